# make train    build the environment, then run recipes/quickstart.yaml under a fresh run name
# make test     every test
# make check    what CI checks beside the tests: lint, format, types, import direction
# make bench    every benchmark, each ending in one JSON line
#
# VENV is the environment to build and use, PYTHON the interpreter that builds it.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Threads that wait must sleep: a spinning OpenMP thread starves every neighbour on a small machine.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: train test check bench

train: $(INSTALLED)
	$(BIN)/relax train recipes/quickstart.yaml run.name=quickstart-$$(date +%Y%m%d-%H%M%S)

test: $(INSTALLED)
	$(BIN)/python -m pytest

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.table

# torch comes first and by its exact version, so that no later package takes another one. Which build that is the index
# decides: on Linux, PyPI's may be a CUDA build of several gigabytes. To take the CPU build instead:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make train
# TRL comes alone: the tests hold our losses against its own, and what they use of it needs nothing else. torchvision lies in a
# folder aside, where one test process finds it: beside a CPU build of torch its own build breaks every import of transformers.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet torch==2.13.0
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps trl==1.16.0
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade --target $(VENV)/torchvision torchvision==0.28.0
	touch $@
