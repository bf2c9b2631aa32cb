# The habits of this project by name. `make` alone lists them.
PYTHON ?= python

.PHONY: help format lint types test coverage soak bench all

help:
	@echo "make format    rewrite the source in the house layout"
	@echo "make lint      ruff: rules and layout"
	@echo "make types     mypy --strict"
	@echo "make test      the tests (in the environment of PYTHON=$(PYTHON))"
	@echo "make coverage  the tests with line and branch coverage, child processes included"
	@echo "make soak      set-up, lint, types, tests and acceptance volumes; writes results/soak-DATE.*"
	@echo "make bench     every script in benchmarks/ but those of scan; each writes a dated result"
	@echo "make all       lint, types and test"

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest

coverage:
	$(PYTHON) -m coverage erase
	$(PYTHON) -m coverage run -m pytest --all
	$(PYTHON) -m coverage combine
	$(PYTHON) -m coverage report

soak:
	bash tests/run.sh --soak

bench:
	@for script in benchmarks/*.py; do echo "$$script"; $(PYTHON) "$$script" || exit 1; done

all: lint types test
