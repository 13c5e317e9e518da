# Everything runs in a virtual environment of its own, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

# The package is tested with the last TRL; `make test-trl` is for the earlier ones, each in an environment of its own.
EARLIER_TRL := 0.29.1 1.10.0

.PHONY: demo test test-trl lint bench clean

demo: $(READY)
	$(BIN)/onepass demo

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

test-trl: $(EARLIER_TRL:%=test-trl-%)

test-trl-%: $(READY)
	rm -rf $(VENV)-trl-$*
	$(PYTHON) -m venv $(VENV)-trl-$*
	echo $(CURDIR)/$(VENV)/lib/python*/site-packages > `echo $(VENV)-trl-$*/lib/python*/site-packages`/base.pth
	$(VENV)-trl-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps trl==$*
	$(VENV)-trl-$*/bin/python -m pip install --quiet --disable-pip-version-check requests  # which they import
	PYTHONPATH=src $(VENV)-trl-$*/bin/python -m pytest -p no:cacheprovider tests/test_trainers.py tests/test_patching.py \
		tests/test_integrations.py

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/onepass bench

$(READY): requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt -e .
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(AXOLOTL)
	touch $@

# Asked for first and alone: a CPU build of this version satisfies every later requirement.
TORCH := $(shell grep '^torch==' requirements-dev.txt)

# It asks for packages of CUDA that its plugins do without.
AXOLOTL := axolotl==0.19.0 addict==2.4.0

clean:
	rm -rf $(VENV) $(VENV)-trl-* .bench demo.png
