# `make demo` and `make test` do all the set-up they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

# Tests wait for processes and sockets more than they compute: three side by side keep two cores busy.
# They may write bytecode, or each of the many that tests start would compile coterie anew.
TEST_PROCESSES ?= 3
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(TEST_PROCESSES)

ENGINE ?= embedded
DEMO_NEEDS = $(if $(filter vllm,$(ENGINE)),vllm-env,install)
DEMO_SIZE_vllm = --requests 32 --concurrency 16 --rounds 1

.PHONY: help install vllm-env check test test-fast demo demo-experts clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## */\t/' | expand -t 16

$(BIN)/.installed: pyproject.toml hatch_build.py $(wildcard src/coterie/*/kernel.c)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

install: $(BIN)/.installed  ## coterie and its development tools into .venv

vllm-env: install  ## real vLLM for CPUs, with the plugin, into .venv-vllm (or $$COTERIE_VLLM_ENV)
	$(BIN)/python scripts/vllm_env.py

check: install  ## format, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: vllm-env  ## everything, real vLLM included (under 25 minutes on two cores)
	$(PYTEST)

test-fast: install  ## what needs no vLLM and takes no minutes (under 90 s)
	$(PYTEST) -m 'not vllm and not slow'

demo: $(DEMO_NEEDS)  ## five policies on five workers of the embedded engine (a few minutes); ENGINE=vllm: real vLLM
	@mkdir -p .demo
	$(BIN)/coterie demo --engine $(ENGINE) $(DEMO_SIZE_$(ENGINE)) --json .demo/result.json --html .demo/report.html

demo-experts: install  ## expert servers under load: one is killed, one is added (a minute)
	@mkdir -p .demo
	$(BIN)/coterie experts demo

clean:           ## remove what the demo left behind (not the environments)
	rm -rf .demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
