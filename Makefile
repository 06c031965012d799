# `make` lists the targets. Every target that needs the environment makes it first; see deploy/setup.sh.

BIN := .venv/bin
READY := .venv/.ready
# Three processes, since many a test waits for another process; each test file in one of them, in the order of
# tests/conftest.py: the long ones first, so that none is left to one process at the end.
TEST := $(BIN)/python -m pytest -q -rs -n 3 --dist loadfile --no-loadscope-reorder
# Hundreds of processes start in the tests: each would compile our sources anew where a machine forbids bytecode on disk.
export PYTHONDONTWRITEBYTECODE :=
# An environment that was copied or moved along with its checkout points to the old place: set-up makes it anew.
MOVED := $(if $(shell head -n 2 .venv/bin/pip 2>/dev/null | grep -F '$(CURDIR)/.venv/bin/'),,moved)

.DEFAULT_GOAL := help
.PHONY: help setup demo test check fix chaos compat deb release fresh first-board image pythons arm examples resume bench fuzz trees mutants clean moved

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Create .venv with all dependencies; install a broker
	@:

$(READY): pyproject.toml constraints.txt deploy/setup.sh $(MOVED)
	@sh deploy/setup.sh

demo: setup ## Train a small network with four agents and a broker on this machine
	@$(BIN)/edge-server trial run deploy/plans/demo.toml --local 4

test: setup ## Run the tests
	@$(TEST)

check: setup ## Run all checks that a change must pass: format, lint, types, import rules, tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(TEST)

fix: setup ## Format, apply fixes of ruff, regenerate the three REFERENCE.md
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/edge-server plan schema --format markdown > .reference && mv .reference edge_server/plan/REFERENCE.md
	@$(BIN)/edge-server config schema --format markdown > .reference && mv .reference edge_server/REFERENCE.md
	@$(BIN)/device-agent config schema --format markdown > .reference && mv .reference device_agent/REFERENCE.md

chaos: setup ## Kill processes of a live run 200 times and check that nothing is lost; KILLS=... SEED=...
	@$(BIN)/edge-server chaos deploy/plans/demo.toml --kills $(or $(KILLS),200) --seed $(or $(SEED),1)

compat: setup ## Check that runs of an earlier version resume and that both versions interoperate; BEFORE=<commit>
	@BEFORE=$(BEFORE) $(TEST) tests/compat

deb: setup ## Build Debian packages of agent and server, for amd64 and arm64, into build/deb; ARCH=... for one
	@$(BIN)/python deploy/debian/build.py $(if $(ARCH),--arch $(ARCH))

release: setup ## Check tree, version, changelog and tag, then build sdist, wheel and Debian packages into dist
	@$(BIN)/python deploy/release.py

fresh: setup ## Install on a bare gateway and board, train, serve, upgrade, purge; as root; RELEASE=13 (or 24.04); ARCH=arm64 CPU=cortex-a53; PURPOSE=infer; BOOT=1; ANSIBLE=1
	@$(BIN)/python -m tests.install.$(if $(ANSIBLE),playbook,check $(if $(ARCH),--arch $(ARCH)) $(if $(BOOT),--boot) $(if $(RELEASE),--release $(RELEASE)) $(if $(CPU),--cpu $(CPU)) $(if $(PURPOSE),--purpose $(PURPOSE)))

first-board: setup ## Run the commands of deploy/boards, word for word, on a bare gateway and board; as root; BOARD=pi4
	@$(BIN)/python -m tests.install.first $(or $(BOARD),pi4)

image: setup ## Build the agent's image by its Dockerfile and run it, without an engine; as root; ARCH=arm64, emulated
	@$(BIN)/python -m tests.install.image $(if $(ARCH),--arch $(ARCH))

pythons: setup ## Import everything and train one round on each supported Python that this machine has
	@$(BIN)/python -m tests.install.pythons

arm: setup ## Install the agent on an emulated ARM board, compare first weights, train beside it; 15 minutes, then 3
	@sh tests/arm/board.sh
	@$(BIN)/python -m tests.arm.check

examples: setup ## Run every command of the three complete examples, and an interrupted Flower app
	@EXAMPLES=all $(BIN)/python -m pytest -q -rs tests/test_examples.py tests/test_flower_app.py

resume: setup ## Measure the bytes that interruptions add to a transfer; ten minutes; as root also on a slow link
	@$(BIN)/python tests/benchmarks/resume.py $(NAME)

bench: setup ## Measure speed and memory; NAME=... for one benchmark, QUICK=1 for the smallest size of each, JSON=... for a file of rows
	@$(BIN)/python tests/benchmarks/run.py $(if $(QUICK),--quick) $(if $(JSON),--json $(JSON)) $(NAME)

fuzz: setup ## Fuzz each parser of untrusted input with a million inputs; NAME=... for one parser, RUNS=... or SECONDS=... each
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/pip install -q -c constraints.txt -e '.[fuzz]'
	@RUNS=$(RUNS) SECONDS=$(SECONDS) $(BIN)/python -m tests.fuzz.run $(NAME)

trees: setup ## Mutate recorded boards ten thousand times; check that no probe crashes, hangs or invents values; TREES=... SEED=...
	@TREES=$(or $(TREES),10000) SEED=$(or $(SEED),0) $(BIN)/python -m pytest -q tests/boards/test_mutated_trees.py

mutants: setup ## Mutate the transfer and aggregation code and list mutants that no test detects; half an hour; SEED=...
	@$(BIN)/python -m tests.mutation.run $(or $(SEED),1)

clean: ## Remove .venv, caches and build outputs; runs/ stays
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
