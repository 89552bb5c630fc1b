# The front door. `make help` lists what there is.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# With the loop over files, a module's tests stay in one process and share their cloud.
PYTEST := $(BIN)/pytest -q
# The same for the tests of `make check` and `make test`, which repeat the few that fail and name them at their end.
TESTS := scripts/run-tests
UNSTABLE := .pytest_cache/unstable
NAME_UNSTABLE = if [ -s $(UNSTABLE) ]; then echo "Unstable tests, which passed only when they were repeated alone:"; cat $(UNSTABLE); fi
PARALLEL := -n auto --dist loadfile
# Most of the quick tests wait for something, so there are twice as many processes as cores.
QUICK := -n $(shell expr 2 \* $$(nproc)) --dist loadfile -m "not postgresql and not thorough" tests/unit tests/functional
SEEDS ?= 1-200
MINUTES ?= 60
SUITE ?= compute
ONLY ?=
CLIENTS ?= glanceclient novaclient openstacksdk openstackclient
OUTAGE ?= 300
EXAMPLES ?= 5
SEED ?= 1
# With WITHOUT_GUESTS=1 tests that this machine cannot run with real guests are skipped; otherwise they fail.
WITHOUT_GUESTS ?=
export MICRONOVA_WITHOUT_GUESTS := $(WITHOUT_GUESTS)
# Runs start many processes; what one of them compiles, or pytest rewrites, need not be done again by the next.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help:  ## this list
	@grep -hE '^[a-z0-9.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 15

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

# What real guests need. Where it cannot be installed, guests are simulated, and micronova up says why.
GUESTS := qemu-system-x86 qemu-utils genisoimage libvirt-daemon-system libvirt-daemon-driver-qemu \
	libvirt-dev pkg-config gcc libc6-dev python3-dev iproute2 nftables dnsmasq-base openssh-client procps ovmf novnc node-xterm spice-html5

.PHONY: guests
guests: .venv
	@if scripts/ensure-packages $(GUESTS); then $(MAKE) --silent --no-print-directory .venv/.guests; \
	else echo "Real guests need these packages; going on without." >&2; fi

.venv/.guests: .venv/.installed
	@echo "Installing libvirt's binding into .venv"
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,libvirt]'
	@touch $@

.PHONY: demo
demo: guests  ## start a cloud, boot a guest, show how, and remove the cloud
	@scripts/demo

.PHONY: up
up: guests  ## a cloud in the foreground, until Ctrl-C
	@$(BIN)/micronova up

.PHONY: check
check: export UNSTABLE_TESTS := $(UNSTABLE)
check: no-unstable lint unit  ## lint, types, architecture, unit and functional tests
	@$(if $(WITHIN_TEST),,$(NAME_UNSTABLE))

.PHONY: lint
lint: .venv  ## ruff (rules and format), mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

.PHONY: format
format: .venv  ## write the code in the format that lint wants
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

.PHONY: coverage
coverage: .venv  ## the unit and functional tests with coverage: the total, and htmlcov/index.html
	@# Processes of other users write files, too.
	@export COVERAGE_FILE=$$(mktemp -d)/coverage && trap 'rm -rf "$${COVERAGE_FILE%/*}"' EXIT && chmod 1777 "$${COVERAGE_FILE%/*}" && \
		$(BIN)/coverage run -m pytest -q $(QUICK) && \
		$(BIN)/coverage combine --quiet && $(BIN)/coverage html --quiet && \
		echo "Covered: $$($(BIN)/coverage report --format=total) %; the lines are in htmlcov/index.html"

.PHONY: graph
graph: .venv  ## draw docs/import-graph.svg: which package imports which
	$(BIN)/python scripts/import-graph

.PHONY: unit
unit: .venv  ## unit and functional tests, on SQLite
	$(TESTS) $(QUICK)

# On separate processes all tests share one cloud: what one leaves behind may let every later one wait, so few may fail.
.PHONY: test
test: export UNSTABLE_TESTS := $(UNSTABLE)
test: WITHIN_TEST := yes
test: no-unstable guests services browser check  ## everything, on real PostgreSQL and RabbitMQ, and with real guests
	$(TESTS) $(PARALLEL) -m "postgresql or thorough" tests/unit tests/functional
	$(TESTS) -n auto tests/simulation
	MICRONOVA_TEST_CLOUD=cluster $(TESTS) --maxfail 10 tests/functional/servers -k "not schemas and not bad_input"
	$(TESTS) -n 2 --dist loadfile tests/integration
	@$(MAKE) --no-print-directory test-e2e
	@$(NAME_UNSTABLE)

.PHONY: no-unstable
no-unstable:
	@mkdir -p $(dir $(UNSTABLE)) && rm -f $(UNSTABLE)

.PHONY: test-e2e
test-e2e: guests services browser  ## real guests, networks and consoles; needs root
	@scripts/ensure-packages busybox e2fsprogs iputils-ping tgt qemu-block-extra
	$(TESTS) -n 2 --dist loadfile tests/e2e
	@if [ "$(WITHOUT_GUESTS)" ]; then echo "WITHOUT_GUESTS: tests of real guests that this machine cannot run were skipped."; fi

.PHONY: tempest
tempest: .venv  ## Tempest, unmodified: make tempest SUITE=compute ONLY=rescue (network, image, identity, volume; scenario needs root)
	$(BIN)/python -m tests.tempest --suite $(SUITE) $(if $(ONLY),--only '$(ONLY)')

.PHONY: client-suites
client-suites: .venv  ## the functional tests of openstacksdk, novaclient, glanceclient and openstackclient, unmodified
	$(BIN)/python -m tests.client_suites $(foreach suite,$(CLIENTS),--suite $(suite))

.PHONY: schemathesis
schemathesis: .venv  ## requests generated from the OpenAPI document, at least 5,000: make schemathesis EXAMPLES=20 SEED=7
	MICRONOVA_EXAMPLES=$(EXAMPLES) MICRONOVA_SEED=$(SEED) $(PYTEST) -s tests/functional/test_schemathesis.py

.PHONY: nova-schemas
nova-schemas: .venv  ## requests that Nova's own schemas accept and refuse, 35,000 of them, sent to our API: make nova-schemas ONLY=keypairs
	$(BIN)/python -m tests.nova_schemas $(if $(NOVA),--nova $(NOVA)) $(if $(ONLY),--only '$(ONLY)')

.PHONY: nova-filters
nova-filters: .venv  ## our filters and weighers and Nova's own on the same hosts, 1,750,000 answers: make nova-filters CASES=100
	$(BIN)/python -m tests.nova_filters $(if $(NOVA),--nova $(NOVA)) $(if $(CASES),--cases $(CASES)) --seed $(SEED)

.PHONY: nova-numa
nova-numa: .venv  ## random instances fitted onto random hosts, NUMA nodes and PCI devices, by Nova's own code and by ours: make nova-numa CASES=1000 SEED=7
	$(BIN)/python -m tests.nova_numa $(if $(NOVA),--nova $(NOVA)) $(if $(CASES),--cases $(CASES)) --seed $(SEED)

.PHONY: placement-gabbi
placement-gabbi: .venv  ## Placement's own functional API tests, unmodified, against our Placement API: make placement-gabbi ONLY=granular
	$(BIN)/python -m tests.placement_gabbi $(if $(PLACEMENT),--placement $(PLACEMENT)) $(if $(ONLY),--only '$(ONLY)')

.PHONY: bench
bench: .venv services  ## the benchmark, on one process and on PostgreSQL and RabbitMQ
	$(BIN)/python -m tests.perf.bench

.PHONY: bench-check
bench-check: .venv services  ## what requests cost, counted on SQLite and PostgreSQL; fails if it is more than tests/perf/counted.json says
	$(BIN)/python -m tests.perf.counted

.PHONY: bench-bus
bench-bus: .venv services  ## our AMQP client against aio-pika: CPU and latency per message
	$(BIN)/python -m tests.perf.bus

.PHONY: bench-scheduler
bench-scheduler: .venv services  ## decisions among 100 to 100,000 hosts, beside Nova's own scheduler on the same fleet: make bench-scheduler HOSTS=10000
	$(BIN)/python -m tests.perf.scheduler $(if $(HOSTS),--hosts $(HOSTS)) $(if $(NOVA),--nova $(NOVA))

.PHONY: soak
soak: .venv services  ## 80 % of the peak load with a fault each minute: make soak MINUTES=60
	$(BIN)/python -m tests.perf.soak --minutes $(MINUTES)

.PHONY: bench-fleet
bench-fleet: .venv services  ## the cost of 10,000 hosts, 100,000 living and 1,000,000 deleted servers
	$(BIN)/python -m tests.perf.fleet

.PHONY: region-docs
region-docs: .venv services  ## follow docs/region.md: every command of its blocks marked sh, on PostgreSQL and RabbitMQ with TLS
	$(BIN)/python -m tests.region_docs

.PHONY: upgrade-test
upgrade-test: .venv services  ## upgrade a region under load from a release, back, and again: make upgrade-test FROM=54be9a88 (release 0.2.0)
	$(BIN)/python -m tests.upgrade $(FROM)

.PHONY: rotation-test
rotation-test: .venv services  ## change the secret key, the broker user and the database role of a region under load
	$(BIN)/python -m tests.rotation

.PHONY: dist
dist:  ## build wheel and sdist into dist/, and start a cloud from the wheel in an empty environment
	@PYTHON=$(PYTHON) scripts/build-dist

.PHONY: dist-debian
dist-debian: dist  ## the same on an empty Debian (debootstrap, chroot); needs root
	@scripts/try-wheel-on-debian

.PHONY: check-oldest
check-oldest:  ## unit tests with the oldest versions of the dependencies that pyproject.toml allows
	@PYTHON=$(PYTHON) scripts/check-oldest

.PHONY: chaos
chaos: .venv services  ## the kill test with five seeds; outages of broker and database of five minutes each
	CHAOS_SEEDS=5 $(PYTEST) tests/integration/test_kill.py
	OUTAGE_SECONDS=$(OUTAGE) $(PYTEST) -s tests/integration/test_outage.py

.PHONY: simulate
simulate: .venv  ## the simulation with many seeds: make simulate SEEDS=1-1000
	MICRONOVA_SEEDS=$(SEEDS) MICRONOVA_EVERY=1 $(PYTEST) -n auto tests/simulation

.PHONY: browser
browser:
	@scripts/ensure-packages chromium novnc node-xterm spice-html5

.PHONY: services
services:
	@scripts/ensure-packages postgresql rabbitmq-server
