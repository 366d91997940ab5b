# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-upstream lint install clean

demo: $(INSTALLED)
	$(BIN)/base-moe demo --json demo.json --plot demo.png

test: $(INSTALLED) lint
	$(BIN)/python -m pytest

# mlx-lm's own model tests under a budget; fetches its source distribution.
test-upstream: $(INSTALLED)
	$(BIN)/python -m tests.upstream

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo.json demo.png
