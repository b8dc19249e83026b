# Everything runs in .venv, which `make install` makes; a target that needs it makes it first.

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/installed
PIP_INSTALL := $(RUN) -m pip install --constraint constraints.txt
BUILD_INPUTS := pyproject.toml constraints.txt setup.py CMakeLists.txt $(shell find cmake csrc -type f)

export SEQWARM_TEST_DATA ?= $(abspath ../shared/data)

.PHONY: help install demo test lint format clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r target text; do \
		printf '%-16s %s\n' "$$target" "$$text"; done

install: $(STAMP)  ## make .venv with the pinned tools, and build the project into it

$(STAMP): $(BUILD_INPUTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) setuptools cmake ninja pybind11 torch
	$(PIP_INSTALL) --no-build-isolation --editable ".[dev]"
	$(RUN) -m seqwarm_kernels info
	touch $@

demo: $(STAMP)  ## run the demo; ARGS="--help" lists its options
	$(RUN) -m seqwarm_kernels demo $(ARGS)

test: $(STAMP)  ## run the tests; ARGS="-k name" selects some
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses $(WORKERS) $(ARGS)

lint: $(STAMP)  ## check style, formatting and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(STAMP)  ## put imports and layout in order
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:  ## remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info seqwarm_kernels/_C.*
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find seqwarm_kernels tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
