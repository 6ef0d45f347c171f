# Every target works on a fresh machine: it makes the environment in .venv first.
# `make PYTHON=python3.12 test` takes another Python for it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
# On a machine with a GPU its own torch stays, or the newest comes.
PINS := $(if $(shell command -v nvidia-smi),,-c constraints-cpu.txt)

.DEFAULT_GOAL := help
.PHONY: help demo demo-yarn test test-all test-gpu test-oldest lint bench docs clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(READY)  ## train a small model on a real book, on the CPU, every lever on (3 minutes)
	$(BIN)/python examples/demo/demo.py

demo-yarn: $(READY)  ## loss by position past a real model's window, with and without YaRN
	$(BIN)/python examples/demo/yarn.py

test: $(READY)  ## the CPU tests
	$(BIN)/python -m pytest -n 2 -m "not gpu and not full" $(TESTS)

test-all: $(READY)  ## the CPU tests with the full cross of levers, and other drawn examples each time
	$(BIN)/python -m pytest -n 2 -m "not gpu" --hypothesis-profile=others

test-gpu: $(READY)  ## the tests that need an NVIDIA GPU
	$(BIN)/python -m pytest -m gpu

test-oldest:  ## the CPU tests with the oldest supported transformers, in .venv-oldest (TESTS=tests/parity for a part)
	$(MAKE) test VENV=.venv-oldest PINS="$(PINS) -c constraints-oldest.txt"

lint: $(READY)  ## ruff, mypy and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## megaspan beside TRL on this GPU; ARGS="--help" lists the arguments
	$(BIN)/python -m benchmarks.compare $(ARGS)

docs: $(READY)  ## write the pages that are made from the code
	$(BIN)/python -m megaspan.config.page > docs/coming-from-trl.md

clean:  ## remove the environments
	rm -rf .venv .venv-oldest

$(READY): pyproject.toml constraints-cpu.txt constraints-oldest.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("megaspan needs Python 3.11: make PYTHON=python3.12 …")'
	echo "making $(VENV), once: pip downloads torch and its libraries, up to some GB, then unpacks them in silence" >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PINS) -e '.[dev]'
	touch $@
	echo "$(VENV) is ready" >&2
