# Everything a person types is here; every target brings its own prerequisites.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.esper-installed
DEPS := pyproject.toml setup.py constraints.txt $(wildcard runtime/_native.c runtime/_health.c runtime/_node.cpp runtime/_segment.h runtime/_bind.h runtime/_torch.h runtime/_calls.h)

.PHONY: help install demo demo-growth test test-slow test-gpu bench bench-report lint docs library clean

help:  ## print this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## make .venv with the pinned versions (again only when the declarations changed)

# torch comes through the constraint as ==2.13.0, so a CPU build that is already at hand satisfies it.
$(STAMP): $(DEPS)
	@echo "making $(VENV): packages, then the autograd node (C++), some minutes the first time"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[forge,demo,risk,test]'
	$(PY) -m runtime build --if-possible
	touch $@

demo: $(STAMP)  ## compile, prove, load and train on real digits
	$(PY) -m bench.demo

demo-growth: $(STAMP)  ## a network on MNIST-1D finds its bottleneck and grafts a proven kernel there
	$(PY) -m bench.growing.demo

# Byte code is written, whatever the environment says: the tests start some hundred processes.
# Three on two processors: tests that wait for disks and processes leave one idle.
test: $(STAMP)  ## everything that runs without a card, in minutes
	PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n 3 --dist loadscope -m "not slow and not gpu"

test-slow: $(STAMP)  ## the long ones
	$(PY) -m pytest -m "slow and not gpu"

test-gpu: $(STAMP)  ## those that need a CUDA card; fails without one
	ESPER_REQUIRE_GPU=1 $(PY) -m pytest -m gpu

bench: $(STAMP)  ## measure against the peers on the card or processor here; writes bench/results/
	$(PY) -m bench.harness

bench-report: $(STAMP)  ## charts and the README's table from the newest results
	$(PY) -m bench.report

lint: $(STAMP)  ## ruff, pyright, import order, size budgets
	$(PY) -m pytest -q tests/test_lint.py tests/test_layers.py tests/test_budgets.py

docs: $(STAMP)  ## rebuild what is generated: docs/errors.md, command references, the README's table
	$(PY) -m docs.build

# Artifacts for a card wait for their proof on a machine that has one.
library: $(STAMP)  ## compile the starter seeds for h100 and for this machine's CPU, and prove the latter
	$(VENV)/bin/esper-forge compile examples/seed_*.json --target h100
	$(VENV)/bin/esper-forge compile examples/seed_*.json --target cpu --json \
	| $(PY) -c "import json, sys; print(*(a['artifact_id'] for a in json.load(sys.stdin)['artifacts']))" \
	| xargs $(VENV)/bin/esper-gauntlet bench

clean:  ## remove the virtual environment and build leftovers
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
