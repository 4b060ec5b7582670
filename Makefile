# The commands of the README are `make demo` and `make test`; each sets up what it needs. `make` alone lists all.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-fast test-postgres crash-test bench style lint format docs screenshots

BIN := .venv/bin
# Tests share small machines with the engines they start; threads that spin while waiting would starve them.
export OMP_WAIT_POLICY ?= PASSIVE
# Tests start some hundred Python processes. Without compiled modules each would compile the packages of the checkout again.
unexport PYTHONDONTWRITEBYTECODE
# Tests wait for engines and servers some of the time: three processes keep two cores busy. Those of a file stay together, since they
# share what they start; the longest files come first (tests/support/durations.py).
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup:  ## make .venv and install everything into it (does nothing when it is up to date)
	@scripts/setup

demo: setup  ## the main job: a language model learns sums, with its experiences in ./buffer
	$(BIN)/rft run examples/grpo_reasoning/config.yaml

test: setup style  ## the checks and the tests (mypy is one) but the long ones; PYTEST_ARGS="-k name" narrows them
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not long" $(PYTEST_ARGS)

test-long: setup  ## what is long by nature: failpoints, storms, full disks, vLLM servers and engines of two processes, the wheel, examples in full
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m long $(PYTEST_ARGS)

test-fast: setup  ## the tests without the slow ones
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not long and not gpu" $(PYTEST_ARGS)

test-postgres: setup  ## tests/store on PostgreSQL 15, the oldest version that a buffer works on
	RFT_TEST_POSTGRES=$$(scripts/oldest_postgres) && export RFT_TEST_POSTGRES && \
	  $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS) tests/store

crash-test: setup  ## kills processes (Ray's too) and cuts networks at random, looks for what is lost; KILLS=1000, LIVES=20, SEED=n, GPU=1
ifneq ($(filter-out 0,$(GPU)),)
	$(BIN)/python -m tests.crash.ray_storm --gpu --lives $(or $(LIVES),20) $(if $(SEED),--seed $(SEED))
else
	$(BIN)/python -m tests.crash.storm --kills $(or $(KILLS),1000) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.crash.ray_storm --lives $(or $(LIVES),20) $(if $(SEED),--seed $(SEED))
endif

bench: setup  ## the speed of buffer and pipelines beside peers, as in the README; wants a machine with nothing else to do
	$(BIN)/rft bench buffer
	$(BIN)/rft bench pipeline --rounds 5

style: setup  ## ruff, the import contracts, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell

lint: style  ## these and mypy (strict)
	$(BIN)/mypy

format: setup  ## let ruff lay out the code and fix what it can
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

docs: setup  ## generate docs/reference, the layers in CONTRIBUTING.md and the diagrams (these need Graphviz)
	$(BIN)/python scripts/schema_reference.py
	$(BIN)/python scripts/rights_reference.py
	$(BIN)/python scripts/stages_reference.py
	$(BIN)/python scripts/algorithm_reference.py
	$(BIN)/python scripts/configuration_reference.py
	$(BIN)/python scripts/layers_reference.py
	$(BIN)/python scripts/token_exactness_picture.py
	dot -Tsvg docs/diagrams/loop.dot -o docs/diagrams/loop.svg

screenshots: setup  ## take the pictures of the studio in docs/studio (these need Chromium)
	$(BIN)/python scripts/studio_screenshots.py
