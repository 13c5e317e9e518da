# Everything runs in a virtual environment of its own, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.PHONY: demo test lint bench clean

demo: $(READY)
	$(BIN)/onepass demo

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/onepass bench

$(READY): requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt -e .
	touch $@

# Asked for first and alone: a CPU build of this version satisfies every later requirement.
TORCH := $(shell grep '^torch==' requirements-dev.txt)

clean:
	rm -rf $(VENV) .bench demo.png
