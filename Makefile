# make demo   compile the demo model and ask it a question
# make test   the tests, in WORKERS processes of about 2 GB, each file in one of them: what it prepares is made once
# make test-all  with them those marked thorough: more of the same models, formats and devices
# make cross  what the tests of code for 64-bit Arm need, as root on Debian: an emulator, a cross compiler, two wheels
# make browser  what the test of the server's page needs, as root on Debian: Chromium, and what drives it
# make lint   ruff and mypy
# make bench  speed of the demo model here
# make format rewrite the sources in the house style

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
QUANT  ?= auto
WORKERS ?= 2
# What runs kernels by several threads: a worker has one core.
ALONE   = $(addprefix tests/targets/test_,attention_blocks.py bf16_pages.py parallel.py top.py) $(patsubst %,tests/runtime/test_%.py,\
	endless library model one_thread overlap pingpong pinning runner soak translator_artifact workers)
CROSS   = qemu-user g++-aarch64-linux-gnu libc6-dev-arm64-cross
MODEL   = build/smollm2-$(QUANT).llmc
SOURCES = $(shell find compiler frontends passes targets -name '*.py' -not -path '*/llmc/*')

.DELETE_ON_ERROR:
.PHONY: demo test test-all cross browser lint bench format clean

demo: $(MODEL)
	$(BIN)/llmc run $(MODEL) "List the months of the year."
	$(BIN)/llmc bench $(MODEL) --prompt-tokens 128 --new-tokens 64 --batch 1 --repeats 1

test: SOME = -m "not thorough"
test-all: ALONE = tests/runtime tests/targets
test test-all: $(VENV)/.dev
	$(BIN)/python -m pytest $(SOME) -n $(WORKERS) --dist loadfile $(addprefix --ignore=,$(ALONE))
	$(BIN)/python -m pytest $(SOME) $(ALONE)

cross: $(VENV)/.compile
	{ command -v qemu-aarch64 && command -v aarch64-linux-gnu-g++; } > /dev/null || \
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $(CROSS); }
	$(BIN)/python -m pip download -q --no-deps --only-binary :all: -d build/aarch64 \
	--platform manylinux_2_28_aarch64 --python-version 3.12 \
	$$($(BIN)/python -m pip freeze | grep -E '^apache-tvm(-ffi)?==')

browser:
	command -v chromedriver > /dev/null || \
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; }

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
