# Two commands matter: `make demo` and `make test`. Both set up their own virtual environment first.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := .models/SmolLM2-135M-Instruct.Q4_1.gguf
READY := $(VENV)/.ready
DEV := $(VENV)/.dev
# Without an NVIDIA GPU the CPU build of torch does, a tenth of the size where pip's index has one (PIP_EXTRA_INDEX_URL).
TORCH := $(if $(shell command -v nvidia-smi),torch,torch==2.13.0)

.PHONY: demo test test-all check format bench compiled clean

demo: $(READY) $(MODEL)
	$(BIN)/nearline demo

test: $(DEV) $(MODEL)
	$(BIN)/python -m pytest -q -m "not slow and not gpu"

test-all: $(DEV) $(MODEL)
	$(BIN)/python -m pytest -q -m "not gpu" --hypothesis-profile=exploring

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV) $(MODEL)
	$(BIN)/python -m benchmarks.cold_start

# A copy of the packages with the minds as machine code: PYTHONPATH=build/compiled nearline simulate …
compiled: $(DEV)
	$(BIN)/python -m nearline.simulator.compiled

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Nearline needs Python 3.11 or newer; try: make PYTHON=python3.12 demo")'
	@test -x $(BIN)/python || { echo "· creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "· installing torch (the largest part, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@echo "· installing nearline"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@$(BIN)/python -m nearline.kernels
	@touch $(READY)

$(DEV): $(READY)
	@echo "· installing what its tests and checks need"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $(DEV)

$(MODEL): | $(READY)
	@echo "· fetching SmolLM2-135M-Instruct (93 MB, once)"
	@$(BIN)/python examples/fetch_smollm2.py .models

clean:
	rm -rf $(VENV) .models .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist src/*.egg-info
