# Two commands matter: `make demo` and `make test`. Both install what they need into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m
TEST_MODEL := gemma3-270m

# GCC 12 drops stores to llama.cpp's AMX tile configuration, and the first decode dies of SIGILL.
# See docs/install.md.
export CFLAGS := $(CFLAGS) -fno-dse -fno-tree-dse
export CXXFLAGS := $(CXXFLAGS) -fno-dse -fno-tree-dse
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo demo-summarize test check lint type bench notebook soak docs clean

demo: $(VENV)/.installed model
	$(BIN)/localbatch run $(MODEL) examples/prompts.jsonl -o answers.jsonl --max-tokens 64 --fresh
	@$(BIN)/python examples/show.py answers.jsonl

# The exit code 3 is that of the three documents which have no text to be had.
demo-summarize: $(VENV)/.installed-examples model
	$(BIN)/python examples/documents.py build/documents
	$(BIN)/localbatch summarize $(MODEL) build/documents -o summaries --length 60 --fresh || [ $$? = 3 ]
	@$(BIN)/python examples/show_index.py summaries/index.jsonl

test: $(VENV)/.installed-test model test-model
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy

bench: $(VENV)/.installed-test model
	$(BIN)/python bench/compare.py --rounds 3

# Runs bench/comparison.ipynb from top to bottom, in place; its figures are this machine's.
notebook: $(VENV)/.installed-test model
	$(BIN)/python bench/run_notebook.py

soak: $(VENV)/.installed-test
	$(BIN)/python -m tests.soak

docs: $(VENV)/.installed
	$(BIN)/python docs/cli_reference.py > docs/cli.md

.PHONY: model
model: $(VENV)/.installed
	@$(BIN)/localbatch models pull $(MODEL)

# Without it, its tests are skipped.
.PHONY: test-model
test-model: $(VENV)/.installed
	-@$(BIN)/localbatch models pull $(TEST_MODEL)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing; building llama.cpp takes some minutes the first time."
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.installed-examples: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs,examples]'
	@touch $@

clean:
	rm -rf $(VENV) answers.jsonl summaries answers.jsonl.journal* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
