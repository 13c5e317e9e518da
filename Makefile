# Everything runs in a virtual environment of its own, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2
# Modules are compiled once, and not in every process that a test starts.
unexport PYTHONDONTWRITEBYTECODE

# `make test` takes the last version of every library. The oldest that is supported of each replacement
# (docs/integrations.md), and what lies between where it has another form, have an environment of their own each.
EARLIER_TRL := 0.29.1 1.10.0
EARLIER_TRANSFORMERS := 4.56.0 5.0.0 5.6.0 5.7.0 5.13.0
EARLIER_PEFT := 0.21.0
EARLIER_TRITON := 3.5.1 3.6.0

# Pythons and torches together, the oldest and the newest of both among them (docs/versions.md). Each torch brings its
# own Triton, which `notriton` removes, as on macOS and Windows.
MATRIX := python3.10-torch2.9.0 python3.13-torch2.9.1 python3.12-torch2.10.0 python3.11-torch2.11.0 \
	python3.12-torch2.12.1 python3.10-torch2.13.0 python3.13-torch2.13.0 python3.13-torch2.13.0-notriton

.PHONY: docs reading plots kernel demo test test-all pytest test-trl test-transformers test-peft test-triton test-matrix \
	lint bench clean

demo: $(READY)
	$(BIN)/onepass demo

test: $(READY)  # at once, since mypy takes one core for half a minute
	$(MAKE) --jobs 2 lint pytest

test-all: $(READY)  # in about three times the time
	$(MAKE) --jobs 2 lint pytest CHOSEN=

CHOSEN := -m "not exhaustive"

pytest: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(CHOSEN)

test-trl: $(EARLIER_TRL:%=test-trl-%)

test-transformers: $(EARLIER_TRANSFORMERS:%=test-transformers-%)

test-peft: $(EARLIER_PEFT:%=test-peft-%)

test-triton: $(EARLIER_TRITON:%=test-triton-%)

test-matrix: $(MATRIX:%=test-%)

test-trl-%: ALSO := requests  # which they import
test-trl-%: TESTS := $(addprefix tests/test_,trainers.py patching.py integrations.py integrations_trl.py)
test-transformers-%: ALSO := datasets 'kernels<0.12'  # of versions for the same huggingface-hub
test-transformers-%: TESTS := $(addprefix tests/test_,patching.py integrations.py integrations_trl.py moe_families.py \
	moe_coverage.py experts_transformers.py)
test-peft-%: TESTS := tests/test_patching.py tests/test_moe_families.py tests/test_experts_transformers.py
test-triton-%: TESTS := tests/test_compile_ahead.py

# One version of one library (as in `make test-transformers-5.17.0`), on top of what the main environment has.
test-%: $(READY)
	rm -rf $(VENV)-$*
	$(PYTHON) -m venv $(VENV)-$*
	echo $(CURDIR)/$(VENV)/lib/python*/site-packages > `echo $(VENV)-$*/lib/python*/site-packages`/base.pth
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts $(subst -,==,$*) $(ALSO)
	PYTHONPATH=src $(VENV)-$*/bin/python -m pytest -n $(WORKERS) --dist loadgroup -p no:cacheprovider $(TESTS)

# One Python, which is looked for on the PATH, with one torch. On Linux for x86_64 torch brings CUDA, and an environment
# takes 6 GB, so it is removed once its tests have passed. Triton 3.5 and 3.6 interpret nothing with NumPy 2.4.
test-python%:
	rm -rf $(VENV)-python$*
	python$(word 1,$(subst -, ,$*)) -m venv $(VENV)-python$*
	$(VENV)-python$*/bin/python -m pip $(QUIETLY) $(subst torch,torch==,$(word 2,$(subst -, ,$*))) \
		'numpy<2.4' 'pytest<9.2' pytest-xdist hypothesis
	$(if $(findstring notriton,$*),$(VENV)-python$*/bin/python -m pip uninstall --quiet --yes triton)
	PYTHONPATH=src $(VENV)-python$*/bin/python -m pytest -n $(WORKERS) --dist loadgroup -p no:cacheprovider \
		$(addprefix tests/test_,statistics.py losses.py softmax_loss.py guard.py torch.py)
	rm -rf $(VENV)-python$*

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks examples hub docs/_site.py
	$(BIN)/ruff format --check src tests benchmarks examples hub docs/_site.py
	$(BIN)/mypy
	$(BIN)/codespell --skip '*.json,*.svg,*.ipynb' README.md CONTRIBUTING.md docs src tests benchmarks examples hub

bench: $(READY)
	$(BIN)/python -m benchmarks logits

# The site, in an environment of its own. A broken link or reference is an error.
docs: $(READY) $(VENV)-docs/.ready
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src:`echo $(VENV)/lib/python*/site-packages` $(VENV)-docs/bin/mkdocs build --strict

# How easy each page is to read, beside PyTorch's documentation; a test demands that none is harder.
reading: $(READY)
	PYTHONPATH=src $(BIN)/python tests/reading.py

# A kernel for Hugging Face's library `kernels` (docs/integrations.md).
kernel:
	$(PYTHON) -m hub.build build/kernel

plots: $(READY)
	$(BIN)/python -m benchmarks table
	$(BIN)/python -m benchmarks plots

$(VENV)-docs/.ready: requirements-docs.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip $(QUIETLY) -r requirements-docs.txt
	touch $@

$(READY): requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip $(QUIETLY) $(TORCH)
	$(BIN)/python -m pip $(QUIETLY) -r requirements-dev.txt -e .
	$(BIN)/python -m pip $(QUIETLY) --no-deps $(AXOLOTL)
	touch $@

# Modules are compiled when they are imported, which few of them are.
QUIETLY := install --quiet --disable-pip-version-check --no-compile

# Asked for first and alone: a CPU build of this version satisfies every later requirement.
TORCH := $(shell grep '^torch==' requirements-dev.txt)

# It asks for packages of CUDA that its plugins do without.
AXOLOTL := axolotl==0.19.0 addict==2.4.0

clean:
	rm -rf $(VENV) $(VENV)-* .bench demo.png site
