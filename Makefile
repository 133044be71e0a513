# Bare `make` prints this list. Every target that needs an environment makes it, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test check fix docs gpu bench env clean

help:  ## Print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## Train a small Llama under eager, inductor and fuse_losses and compare them
	$(BIN)/fuse-losses demo

test: $(VENV)/.test  ## Run the whole CPU suite
	$(BIN)/python -m pytest -n $(JOBS)

check: $(VENV)/.check $(VENV)/.test docs  ## Lint, formatting, types and the documentation, nothing changed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

fix: $(VENV)/.check  ## Apply the lint fixes and the formatter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs  ## Build the documentation into site/, strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

gpu:  ## Run the CUDA tests with the current python (no environment is made)
	$(PYTHON) -m pytest -m gpu

bench:  ## Run the benchmark with the current python (no environment is made)
	$(PYTHON) -m fuse_losses.cli bench

env: $(VENV)/.test $(VENV)/.check $(VENV)/.docs  ## Make the development environment

clean:  ## Remove the environment and everything that was built
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis demo-memory.png

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp per extra; it is made again when what it was made from has changed.
$(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[$*]"
	@touch $@
