# Every target sets itself up in .venv, and installs nothing a second time.
# Another Python: make PYTHON=python3.12 test

PYTHON ?= python3
DEMO ?= recipes/gpt-stdlib.toml
BIN := .venv/bin
# Many tests start ranks of their own, so more workers than these would fight for memory.
WORKERS := --numprocesses=auto --maxprocesses=8 --dist=worksteal

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Threads that sleep when they wait, not spin: beside another busy process a step is 5 times as fast.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help demo test slow lint format docs clean

help:
	@echo "make demo    train a GPT on the source code of Python's own library, a few minutes on 2 cores"
	@echo "make test    the tests"
	@echo "make slow    the tests that take longer than about 20 seconds each"
	@echo "make lint    ruff and pyright"
	@echo "make format  let ruff format the code"
	@echo "make docs    write docs/recipe.md and docs/recipe.schema.json from the recipe's fields"
	@echo "make clean   remove .venv and caches; runs stay"

demo: .venv/installed
	$(BIN)/megalith train $(DEMO) --overwrite

test: .venv/installed-dev
	$(BIN)/python -m pytest $(WORKERS)

slow: .venv/installed-dev
	$(BIN)/python -m pytest $(WORKERS) -m slow

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/installed
	$(BIN)/python docs/write_reference.py

clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not Python 3.11 or newer; try: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv .venv

# The stamps are what keeps the second run from installing; the larger install covers both.
.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/installed-dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch .venv/installed $@
