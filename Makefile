# Everything a developer does, in a few words. `make help` lists the targets.
# Needs Python 3.11 or newer with venv, make and (for the CPU kernels) g++. All else goes into .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# Where torch comes from, when pip's own settings would bring a build that does not fit this machine:
# make serve TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

# What `make serve` serves, and where. Empty: the default of `tokenloom serve`. Not from the environment, where HOST and PORT are common.
MODEL =
HOST =
PORT = 8000
ARGS =

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
INSTALL_INPUTS := pyproject.toml hatch_build.py $(shell find protos -name '*.proto')
KERNEL_SOURCES := $(shell find services/worker/kernels/cpu -name '*.cpp' -o -name '*.h' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help serve test bench test-constraints test-fuzz test-docker lint lint-style lint-types lint-imports lint-protos lint-tree lint-k8s protos install clean

help: ## Lists the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12
	@echo
	@echo "variables   PORT=$(PORT) HOST= MODEL= (directory, .gguf or hub id)  ARGS='--max-num-seqs 8'  TORCH_INDEX=URL  PYTHON=$(PYTHON)"

serve: $(VENV)/.serve $(VENV)/.kernels ## Installs what is missing and serves a model until Ctrl-C
	@exec $(BIN)/tokenloom serve $(MODEL) --port $(PORT) $(if $(HOST),--host $(HOST)) $(ARGS)

test: $(VENV)/.dev $(VENV)/.kernels ## Runs the whole suite (ARGS are pytest's)
	@$(BIN)/python -m pytest $(ARGS)

bench: $(VENV)/.dev $(VENV)/.kernels ## Compares with vLLM, llama.cpp and transformers on this machine's CPUs (long; goes on where it stopped)
	@$(BIN)/python -m bench.peers run $(ARGS)

test-constraints: $(VENV)/.dev $(VENV)/.kernels ## 200 random schemas on the real model with each backend (minutes)
	@CONSTRAINT_SCHEMAS=200 $(BIN)/python -m pytest -s tests/integration/test_worker_constraints_model.py $(ARGS)

test-fuzz: $(VENV)/.dev $(VENV)/.kernels ## 10,000 spoiled bodies, another seed each time, and hundreds by schemathesis (minutes)
	@FUZZ_CASES=10000 FUZZ_SEED=$$(date +%s) $(BIN)/python -m pytest tests/integration/test_gateway_fuzz.py \
		tests/integration/test_gateway_schemathesis.py $(ARGS)

test-docker: $(VENV)/.dev ## Builds the images and runs them on this machine's Docker engine (minutes)
	@$(BIN)/python -m pytest -m docker -s tests/docker $(ARGS)

lint: lint-style lint-types lint-imports lint-protos lint-tree lint-k8s ## Style, types, imports, contracts and sizes (-k: all of them)

lint-style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: $(VENV)/.dev
	$(BIN)/mypy

lint-imports: $(VENV)/.dev
	$(BIN)/lint-imports --no-logo

lint-protos: $(VENV)/.dev
	$(BIN)/buf lint protos
	$(BIN)/buf format protos --diff --exit-code

lint-tree: $(VENV)/.dev
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/check_tree.py

lint-k8s: $(VENV)/.dev
	$(BIN)/python -m tools.prometheus_rule --check
	$(BIN)/python -m tools.k8s_check

protos: $(VENV)/.dev ## Makes the stubs again after an edit of protos/
	$(BIN)/python hatch_build.py

install: $(VENV)/.dev $(VENV)/.kernels ## Installs everything for development

clean: ## Removes the environment, the stubs and all caches of the tools
	rm -rf $(VENV) libs/stubs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no python3 found; give one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make: Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0])'
	@echo "making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch first: where TORCH_INDEX names an index, the second install finds its range already satisfied.
define install_torch
	@$(if $(TORCH_INDEX),$(PIP) --index-url $(TORCH_INDEX) "$$($(BIN)/python tools/requirement.py torch)")
endef

$(VENV)/.serve: $(INSTALL_INPUTS) | $(BIN)/python
	@echo "installing tokenloom for serving (once; some minutes)"
	$(install_torch)
	@$(PIP) -e '.[all]'
	@touch $@

$(VENV)/.dev: $(INSTALL_INPUTS) | $(BIN)/python
	@echo "installing tokenloom for development (once; some minutes)"
	$(install_torch)
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.serve

$(VENV)/.kernels: $(VENV)/.serve $(KERNEL_SOURCES)
	@$(BIN)/python -m services.worker.kernels.cpu.build
	@touch $@
