# The front door. `make help` lists what there is.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# With the loop over files, a module's tests stay in one process and share their cloud.
PYTEST := $(BIN)/pytest -q
PARALLEL := -n auto --dist loadfile

.PHONY: help
help:  ## this list
	@grep -hE '^[a-z0-9.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

.PHONY: .venv
.venv: .venv/.installed  ## the environment, with .venv/bin/micronova

.venv/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || scripts/ensure-packages python3
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed; name one with make PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || scripts/ensure-packages python3-venv
	@test -x $(BIN)/pip || { echo "Creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "Installing Micronova and what it needs into .venv"
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@$(BIN)/python -m compileall -q src
	@touch $@

.PHONY: demo
demo: .venv  ## start a cloud, boot a server, show how, and leave nothing behind
	@scripts/demo

.PHONY: up
up: .venv  ## a cloud in the foreground, until Ctrl-C
	@$(BIN)/micronova up

.PHONY: check
check: lint unit  ## lint, types, architecture, unit and functional tests: under three minutes

.PHONY: lint
lint: .venv  ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

.PHONY: unit
unit: .venv services  ## unit and functional tests
	$(PYTEST) $(PARALLEL) $(wildcard tests/unit tests/functional)

.PHONY: test
test: check  ## everything, on real PostgreSQL and RabbitMQ as well
	$(PYTEST) tests/integration

.PHONY: test-e2e
test-e2e: .venv  ## real guests and real networks, as root: driver and agent on their own; not part of make test yet
	$(PYTEST) tests/e2e

.PHONY: bench
bench: .venv services  ## the benchmark, on one process and on PostgreSQL and RabbitMQ
	$(BIN)/python -m tests.perf.bench

.PHONY: chaos
chaos: .venv services  ## the kill test, with five seeds
	CHAOS_SEEDS=5 $(PYTEST) tests/integration/test_kill.py

.PHONY: services
services:
	@scripts/ensure-packages postgresql rabbitmq-server
