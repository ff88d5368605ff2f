# Everything is made in $(VENV); nothing outside the checkout is touched. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Consulted beside PyPI: where it can be reached, its CPU build (2.13.0+cpu) is preferred to PyPI's, which brings
# gigabytes of CUDA on Linux. TORCH_INDEX=https://download.pytorch.org/whl/cu130 for a CUDA build, empty for PyPI alone.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help venv demo test lint types check format bench bench-memory bench-copy bench-kills bench-kernels bench-quality bad-inputs clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install --quiet --retries 1 -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$(TORCH)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

venv: $(READY) ## make the environment in .venv (torch without CUDA where that can be had)

demo: $(READY) ## quantize a real trained model and show that the result still works
	$(BIN)/python demo/minilm.py $(ARGS)

test: $(READY) ## run the tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY) ## check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY) ## check types, strictly
	$(BIN)/mypy

check: lint types test ## everything that CI runs

format: $(READY) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: bench-quality bench-kernels bench-memory bench-copy bench-kills ## all benchmarks (tens of GB of disk, minutes)

bench-kernels: $(READY) ## encode and decode throughput beside memcpy
	$(BIN)/python benchmarks/kernels.py $(ARGS)

bench-memory: $(READY) ## peak memory on checkpoints of 1 and 4 GB
	$(BIN)/python benchmarks/memory.py $(ARGS)

bench-copy: $(READY) ## wall time beside cp -r of the same folder
	$(BIN)/python benchmarks/copying.py $(ARGS)

bench-kills: $(READY) ## twenty kills at random moments, and what was redone
	$(BIN)/python benchmarks/kills.py $(ARGS)

bench-quality: $(READY) ## relative error per bit on real weights, beside other quantizers
	$(BIN)/python benchmarks/quality.py $(ARGS)

bad-inputs: $(READY) ## write docs/bad-inputs.md: what every bad input gets
	$(BIN)/python tests/hostile/table.py > docs/bad-inputs.md

clean: ## remove the environment and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
