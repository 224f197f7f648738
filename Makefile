# Two commands matter: `make demo` and `make test`. Each target makes the environment that it needs.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
VENV := .venv
BIN := $(VENV)/bin

# An interpreter that an unprivileged user can execute too: tests run workers as another user, and so do servers.
PYTHON ?= $(shell for p in /usr/bin/python3.1[1-9] /usr/local/bin/python3 /usr/bin/python3 python3; do \
	"$$p" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { command -v "$$p"; break; }; done)

.PHONY: demo test check bench soak gpu docs clean

demo: $(VENV)/.demo
	$(BIN)/hwr demo $(DEMO)

test: $(VENV)/.dev
	$(BIN)/pytest -m "not soak and not bench and not gpu" $(PYTEST)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python docs/generate.py --check

bench: $(VENV)/.bench
	$(BIN)/pytest -m bench tests/bench $(PYTEST)

soak: $(VENV)/.dev
	$(BIN)/pytest -m soak $(PYTEST)

gpu: $(VENV)/.dev
	$(BIN)/pytest -m gpu tests/gpu $(PYTEST)

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .demo bench.json

# Installed once for each set of requirements; the marker is newer than what it was made from.
$(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$*]'
	touch $@

$(VENV)/bin/python:
	@[ -n "$(PYTHON)" ] || { echo "No Python of at least 3.11 with venv was found."; echo "Install one, or say which: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
