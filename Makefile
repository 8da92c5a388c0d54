# Everything runs from .venv; a machine with an NVIDIA GPU gets the full set of packages, others the slim one.
PYTHON ?= python3
SET := $(shell nvidia-smi -L >/dev/null 2>&1 && echo full || echo cpu)
# A process has one SGLang engine: these modules make their own.
OWN_ENGINE := tests/shells/test_radix_engine.py tests/workflows/test_on_smollm2.py
READY := .venv/.ready-$(SET)
BIN := .venv/bin

# Without bytecode every process of an application compiles SGLang and Ray anew: minutes at each start. A `Served` has
# the loops of the forecasts compiled, which a controller would otherwise do at its first start.
unexport PYTHONDONTWRITEBYTECODE
WARM := import deployments.app, ray.serve, sglang.srt.entrypoints.engine, sglang.srt.managers.scheduler; \
	from pbkv_ray.predict.serving import Served; Served()

.PHONY: help setup demo test test-core soak lint lock wheel clean
help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(READY): deployments/requirements/$(SET).txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "Python 3.11 to 3.13 is needed; name one: make PYTHON=python3.11 setup"; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv \
	  || { echo "the venv module is missing: apt-get install python3-venv"; exit 2; }
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/uv pip install --quiet --no-deps -r deployments/requirements/$(SET).txt
	VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/uv pip install --quiet --no-deps -e .
	$(BIN)/python -m pbkv_ray.engine.models default
	$(BIN)/python -W ignore -c '$(WARM)' 2>/dev/null
	@rm -f .venv/.ready-* && touch $@

setup: $(READY) ## create .venv, install the pinned packages, prepare the default model

demo: setup ## run three runs of each workflow on a real engine and show what they did
	$(BIN)/pbkv demo

test: setup ## all tests (no GPU needed)
	$(BIN)/python -m pytest
	set -e; for module in $(OWN_ENGINE); do $(BIN)/python -m pytest -m own_engine $$module; done

soak: setup ## what takes long or is not yet trusted in CI
	$(BIN)/python -m pytest -m soak tests/shells
	$(BIN)/python -m pytest -m soak tests/e2e

test-core: setup ## the pure core only, in seconds
	$(BIN)/python -m pytest tests/core -q

lint: setup ## formatting, style, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lock: setup ## renew deployments/requirements/*.txt from pyproject.toml
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m deployments.requirements.lock

wheel: setup ## build the wheel into dist/
	$(BIN)/uv build --quiet --wheel --no-build-isolation --python $(BIN)/python -o dist

clean: ## remove the environment
	rm -rf .venv
