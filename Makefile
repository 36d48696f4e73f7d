# `make demo` and `make test` set everything up by themselves from a bare Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Real data sets, where they lie beside the repository; tests that need them skip without.
ifneq ($(wildcard ../shared/data),)
export EPSILONS_DATA ?= $(abspath ../shared/data)
endif

.PHONY: setup demo test experiments-test slow lowest check docs format clean

setup: $(READY)  ## .venv, and nothing else

demo: $(READY)  ## train four ways on the embedded digits and compare
	$(BIN)/epsilons train

# One process per core with one thread each: small tensors gain nothing from a second thread. Bytecode is kept, because
# the tests start many processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal

test: $(READY)  ## everything but the long statistical tests
	$(PYTEST)

experiments-test: $(READY)  ## the tests of experiments/, which `make test` leaves out
	$(PYTEST) experiments/tests

slow: $(READY)  ## the long ones, too
	$(PYTEST) --slow tests src experiments/tests

# With torch 2.6 these two hang: a second process group in one process, and a fork beside torch's compiling threads.
HANGING := --ignore tests/test_ranks.py --ignore tests/conformance/test_mutants.py

lowest: constraints-lowest.txt  ## the tests at the oldest versions that the metadata promise, in an environment of their own
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(VENV)-lowest/bin/python -m pip install --quiet --constraint $< torch
	$(VENV)-lowest/bin/python -m pip install --quiet --constraint $< --group dev --editable '.[app]'
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)-lowest/bin/pytest --numprocesses auto --dist worksteal $(HANGING)

check: $(READY)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)  ## build the documentation into site/; warnings are errors (but not with --quiet)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch comes first and pinned: without the pin the registry's newest build would bring gigabytes of CUDA along.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "epsilons needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --group flower --editable '.[app]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest .pytest_cache .mypy_cache .ruff_cache build dist site
