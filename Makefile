# Everything that is done with this checkout. `make help` lists the targets; each that needs the
# virtual environment in .venv makes it by itself when it is missing or older than its
# requirements. `gpu` alone runs on PYTHON as it is and makes none: a GPU machine comes with the
# torch that fits its driver, often without a line to the package index. `clients` alone needs none
# but its own.
#
#   make PYTHON=python3.13 ...                   another Python (3.11 to 3.13)
#   make REQUIREMENTS=requirements/cuda.txt ...  for NVIDIA GPUs
#   make PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu ...
#                                                torch's much smaller CPU build

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
REQUIREMENTS ?= requirements/cpu.txt
PORT ?= 8000
ONCE ?=
REFERENCE ?=
BENCH ?= handoff
TESTS ?= tests
MINUTES ?= 130
SEEDS ?= 100000
JOBS ?= $(shell nproc)
ONLY ?=
PARTS ?=
RESULTS ?= results
WHEELS ?= build/wheels
PYTHON312 ?= python3.12
RUNS ?= 3
HOURS ?= 0.5

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PACKAGES := decode_worker deploy engine kv_transfer models planner prefill_worker proto router runtime simulation
# Tests that start processes do not run beside those that fill all cores: tests of whole fleets run
# after them, the others, which wait for most of their time, four at a time. Tests that measure how
# long something takes are marked `timed` and run last, four at a time too: they wait for two thirds
# of theirs.
PODS := $(patsubst %,tests/helm/test_%.py,kind_cluster kubectl operator_commands release_under_load rendered_pods roles_under_load rotation_under_load running_controller running_ray_models running_ray_scale running_raycluster running_redis running_release running_scale)
FLEETS := tests/chaos tests/clients tests/e2e $(PODS)
# Two at a time run those that compare tokens and wait for events. One after the other run all else:
# what bounds or compares times (demo, timeline, console, bad_input), gives requests the time of a
# phase (cancel), has fixed addresses (pods), or shares one fleet (the rest of tests/e2e).
IN_PAIRS := $(patsubst %,tests/e2e/test_%.py,faults same_tokens trace prompt_logprobs) \
    $(patsubst %,tests/clients/test_%.py,structured)
STARTERS := tests/benchmarks tests/deploy
# Tests over the text of all code: part of `make check`, and not run again by `make test`.
CHECKED := $(addprefix tests/test_,architecture.py import_homes.py loaded_packages.py glossary.py dangerous_calls.py mutation_targets.py parameter_types.py reasons.py)
TIMED = $(shell grep -rl --include='test_*.py' 'pytest\.mark\.timed' tests)
# In these folders a conftest marks tests: all that start a benchmark, those on most of the models, or
# on a second kind of Redis server.
NIGHTLY_FOLDERS := tests/benchmarks tests/chaos tests/engine tests/runtime/shared_registry
NIGHTLY = $(shell grep -rl --include='test_*.py' 'pytest\.mark\.nightly' tests)
# No test uses schemathesis' plugin, which takes 0.3 s of each process of pytest.
PYTEST = $(BIN)/python -P -m pytest -p no:schemathesis --durations=20
# One more than there are cores, since many tests wait for a moment; four at most.
WORKERS = $(shell echo $$(( $$(nproc) < 4 ? $$(nproc) + 1 : 4 )))
# In the order of tests/support/file_order.py: files of the fewest tests, which take the longest,
# would come last.
BY_FILE := --dist=loadfile --no-loadscope-reorder
LINKS := $(PACKAGES:%=build/typing/baton/%)
# Third-party clients, each set in an environment of its own; the second list is large.
CLIENTS := build/clients/browser build/clients/openai2 build/clients/openai3
LARGE_CLIENTS := build/clients/aiperf build/clients/guidellm build/clients/lmeval build/clients/vercel

# Where it is set, each of the hundreds of processes compiles Baton's code again.
unexport PYTHONDONTWRITEBYTECODE
# Two torch processes that spin on the same cores slow each other thirty times.
export OMP_WAIT_POLICY := passive
export GOMP_SPINCOUNT := 0

.PHONY: help install clients demo test nightly check types texts format proto settings dashboards chart pictures locks models ship faults chaos soak bench gpu wheels clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

# Python compiles a module when it is first imported; pip would compile all 18,000 of them (`--no-compile`).
install: $(STAMP) ## the virtual environment in .venv

$(STAMP): $(REQUIREMENTS) requirements/cpu.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] <= (3, 13); \
	    sys.exit(None if ok else "Baton needs Python 3.11, 3.12 or 3.13: make PYTHON=python3.13")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch (the largest part: minutes on a slow line)"
	@$(BIN)/pip install --quiet --no-compile --constraint requirements/cpu.txt \
	    "$$(grep -i '^torch==' requirements/cpu.txt)" setuptools
	@echo "installing the rest"
	@$(BIN)/pip install --quiet --no-compile --no-deps -r $(REQUIREMENTS) -r requirements/dev.txt
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(STAMP) ## one prefill and one decode worker answer a chat (ONCE=1: then end)
	@$(BIN)/baton demo --prefill 1 --decode 1 --port $(PORT) $(if $(ONCE),--once)

clients: $(CLIENTS:%=%/.installed) ## third-party clients in build/clients, which tests call Baton with

build/clients/%/.installed: requirements/clients/%.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "installing the clients $*"
	@$(@D)/bin/pip install --quiet --no-deps --no-compile -r $<
	@touch $@

build/clients/vercel/.installed: requirements/clients/vercel/package-lock.json
	@mkdir -p $(@D)/bin
	@cp requirements/clients/vercel/package.json $< $(@D)
	@if command -v npm >/dev/null; then \
	    echo "installing the client vercel"; \
	    npm ci --prefix $(@D) --no-audit --no-fund --silent; \
	    ln -sf "$$(command -v node)" $(@D)/bin/node; \
	    touch $@; \
	else echo "npm is absent: the client vercel is left out"; fi

test: $(STAMP) ## all tests that need no GPU, but those of `make check` (TESTS=tests/engine: some of them)
ifeq ($(TESTS),tests)
	@result=0; \
	$(PYTEST) --numprocesses=$(WORKERS) $(BY_FILE) \
	    -m "not timed and not nightly" $(patsubst %,--ignore=%,$(FLEETS) $(STARTERS) $(CHECKED)) || result=$$?; \
	$(PYTEST) --numprocesses=4 $(BY_FILE) -m "not timed and not nightly" $(STARTERS) || result=$$?; \
	$(PYTEST) --numprocesses=2 $(BY_FILE) -m "not nightly" $(IN_PAIRS) || result=$$?; \
	$(PYTEST) -m "not nightly" $(FLEETS) $(patsubst %,--ignore=%,$(IN_PAIRS)) || result=$$?; \
	$(PYTEST) --numprocesses=4 $(BY_FILE) -m "timed and not nightly" $(TIMED) || result=$$?; \
	exit $$result
else
	$(PYTEST) $(TESTS)
endif

nightly: $(STAMP) clients $(LARGE_CLIENTS:%=%/.installed) ## slow, repeated and tooling tests, and what they skipped
	@result=0; \
	$(PYTEST) -rs --numprocesses=2 $(BY_FILE) -m nightly \
	    $(filter-out $(FLEETS) $(FLEETS:%=%/%),$(NIGHTLY) $(NIGHTLY_FOLDERS)) || result=$$?; \
	$(PYTEST) -rs -m nightly $(FLEETS) || result=$$?; \
	exit $$result

check: $(STAMP) ## format, lint, types, architecture, words, generated code, targets of mutations, reasons
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory --jobs=2 --output-sync types texts

types: $(STAMP) $(LINKS) ## the part of `make check` that reads types
	$(BIN)/mypy $(PACKAGES:%=-p baton.%) -p chaos -p benchmarks -p tests.support

texts: $(STAMP) ## the part of `make check` that reads the text of all code
	$(BIN)/python -P -m pytest -q $(CHECKED)

format: $(STAMP) ## put the code into its format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP) ## generate the wire contract's Python code
	$(BIN)/python -P -m baton.proto.generate

settings: $(STAMP) ## generate the default settings file, the settings reference, and the chart's list of settings
	$(BIN)/python -P -m baton.runtime.settings.reference

dashboards: $(STAMP) ## generate Prometheus' rules and Grafana's dashboards
	$(BIN)/python -P -m baton.deploy.monitoring.generate

chart: $(STAMP) ## generate the table of values in the chart's README
	$(BIN)/python -m tests.support.chart_table

pictures: $(STAMP) build/clients/browser/.installed ## take the pictures of docs/console.md again
	$(BIN)/python -m tests.support.console_pictures

locks: $(STAMP) ## generate requirements/*.lock: packages of the images with their hashes
	$(BIN)/python -P -m baton.deploy.docker.locks

models: $(STAMP) ## train baton-tiny and its draft from nothing, in two stages, and measure them (MINUTES=130)
	$(BIN)/python -P -m baton.models.training.train --folder build/models --minutes $(MINUTES)
	$(BIN)/python -P -m baton.models.evaluation.evaluate --folder build/models --card \
	    --json build/models/evaluation.json

ship: $(STAMP) ## put what `make models` made into the package, if it is good enough
	$(BIN)/python -P -m baton.models.ship --folder build/models

faults: $(STAMP) ## the fault lab: 100,000 simulated fleets (SEEDS=2000, JOBS=2)
	@mkdir -p results
	$(BIN)/baton faults --seeds $(SEEDS) --jobs $(JOBS) --json results/faults.json

chaos: $(STAMP) ## faults on real processes, each three times (ONLY=kill-decode,leave RUNS=3)
	@mkdir -p results
	$(BIN)/python -m chaos.run --runs $(RUNS) $(if $(ONLY),--only $(ONLY)) --json results/chaos.json

soak: $(STAMP) ## load in a loop: memory, descriptors, tasks and blocks, plotted (HOURS=0.5)
	@mkdir -p results
	$(BIN)/python -m chaos.soak --hours $(HOURS) --folder results

bench: $(STAMP) ## a benchmark, as JSON in results/ (BENCH=handoff)
	@mkdir -p results
	$(BIN)/python -m benchmarks.$(BENCH) --json results/$(BENCH).json

gpu: $(LINKS) ## parity and speed on a CUDA device (PYTHON=any with torch, RESULTS=, REFERENCE=, PARTS=)
	@begun=$$(date +%s.%N); \
	$(PYTHON) -c 'import torch, sys; \
	    sys.exit(None if torch.cuda.is_available() else "torch sees no CUDA device here")'; \
	PYTHONUNBUFFERED=1 PYTHONPATH=build/typing$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m benchmarks.gpu \
	    --begun $$begun --results $(RESULTS) $(if $(REFERENCE),--reference $(REFERENCE)) \
	    $(if $(PARTS),--only $(PARTS))

wheels: $(STAMP) ## what a GPU machine without an index needs, fetched and checked (WHEELS=, PYTHON312=)
	$(BIN)/python -m benchmarks.gpu_parts.wheels --folder $(WHEELS) --python $(PYTHON312)

$(LINKS):
	@mkdir -p $(@D)
	@ln -sfn ../../../$(@F) $@

clean: ## remove what was made, .venv included
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
