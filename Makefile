# make demo   compile the demo model and ask it a question
# make test   every test, in WORKERS processes of about 2 GB
# make lint   ruff and mypy
# make bench  speed of the demo model here
# make format rewrite the sources in the house style

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
QUANT  ?= auto
WORKERS ?= 2
# What runs kernels by several threads: a worker has one core.
ALONE   = tests/targets tests/runtime
MODEL   = build/smollm2-$(QUANT).llmc
SOURCES = $(shell find compiler frontends passes targets -name '*.py' -not -path '*/llmc/*')

.DELETE_ON_ERROR:
.PHONY: demo test lint bench format clean

demo: $(MODEL)
	$(BIN)/llmc run $(MODEL) "Give me three tips for staying healthy."
	$(BIN)/llmc bench $(MODEL) --prompt-tokens 128 --new-tokens 64 --batch 1 --repeats 1

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(addprefix --ignore=,$(ALONE))
	$(BIN)/python -m pytest $(ALONE)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(MODEL)
	$(BIN)/llmc bench $(MODEL)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist $(VENV)

$(MODEL): $(VENV)/.compile examples/fetch_smollm2.py $(SOURCES)
	mkdir -p build
	rm -rf $@
	gguf=$$($(BIN)/python examples/fetch_smollm2.py) && \
	$(BIN)/llmc compile "$$gguf" -o $@ --quant $(QUANT)
	@touch $@

# The stamps: a second `make` installs nothing unless pyproject.toml changed.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.compile: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[compile]'
	@touch $@

# torch first and by itself: transformers would otherwise choose which build of it comes.
$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@ $(VENV)/.compile
