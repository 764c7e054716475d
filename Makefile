# Needs Python 3.11 or newer (which the pinned versions are for), pip and make. `make help` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
# More arguments for pip, such as the index of CPU-only torch wheels from PyTorch's installation page.
PIP_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)

.DEFAULT_GOAL := help
.PHONY: help venv peers demo test format check format-check lint types imports bench clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Users need only this: the package and what the examples read their data with.
$(VENV)/.demo: pyproject.toml constraints.txt
	@echo "Installing halfstep with pinned versions into $(VENV) (torch is large; this takes a minute or two) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --editable '.[examples]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	@echo "Installing halfstep for development with pinned versions into $(VENV) (torch is large; this takes a minute or two) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.peers: $(VENV)/.dev
	@echo "Installing Accelerate, Lightning and transformers, which the benchmarks measure beside halfstep ..."
	@$(PIP) --editable '.[dev,peers]'
	@touch $@

venv: $(VENV)/.dev ## Make .venv with everything for development.

peers: $(VENV)/.peers ## Add Accelerate, Lightning and transformers to it, for the benchmarks.

demo: $(VENV)/.demo ## Compare fp32 with bf16 and fp16 on ResNet-18: about two minutes on two cores.
	@# Exit code 1 means that a precision trains worse here, or fails: an answer, and no error of the demo.
	@$(BIN)/halfstep compare examples/cifar_resnet18.py:task --channels-last --html halfstep-report.html || test $$? -eq 1

test: $(VENV)/.dev ## Run the tests.
	$(BIN)/python -m pytest

format: $(VENV)/.dev ## Format the code.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: format-check lint types imports test ## Everything that CI runs: format, lint, types, import contract, tests and documentation examples.

format-check: $(VENV)/.dev
	$(BIN)/ruff format --check .

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/halfstep lint .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

bench: $(VENV)/.peers ## Measure the engine beside hand-written loops, Accelerate and Lightning Fabric.
	$(BIN)/python benchmarks/step_overhead.py

clean: ## Remove the virtual environment and caches.
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
