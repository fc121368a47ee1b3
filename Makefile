# Two commands do everything: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help setup setup-flink setup-spark setup-ray demo test test-all test-gpu test-engines check format docs docs-figures docs-measured offline-site clean

help:
	@echo "make demo      train a small language model on all local cores, write text with it, audit the run"
	@echo "make test      the tests (make test-all adds the long ones)"
	@echo "make check     format, lint, types, layers"
	@echo "make test-engines  the golden checksum on Spark, Ray and Flink (make setup-spark, setup-ray, setup-flink)"
	@echo "make docs      build the documentation into site/ (make docs-figures, docs-measured update the outputs that it quotes)"

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11 [setup-python]"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: this Python has no venv; on Debian and Ubuntu: apt-get install python3-venv [setup-venv]"; exit 2; }
	@echo "installing into $(VENV); torch is the large part, a minute or more"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[run,data,plots,dev]'
	@$(BIN)/python -m compileall -q src
	@touch $@

demo: setup
	$(BIN)/meshwright train examples/demo.toml
	$(BIN)/meshwright generate $$(ls -td runs/demo-* | head -n 1) --prompt 'def ' --tokens 160 --temperature 0.7
	$(BIN)/meshwright audit $$(ls -td runs/demo-* | head -n 1)
	@echo "next: source .venv/bin/activate; meshwright init; the report is $$(ls -td runs/demo-* | head -n 1)/report.html"

# Two files at once, the longest first: tests that start ranks wait most of the time. Fault tests have deadlines:
# they run after the others, at most two at once.
# Bytecode is cached even where the environment forbids it: every rank and command would compile the package again.
JOBS ?= 2
test test-all: export PYTHONDONTWRITEBYTECODE =
PYTEST := $(BIN)/python -m pytest
test: setup
	$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder tests/multiproc tests/unit
	$(PYTEST) -n 2 tests/faults

# Everything but the GPU tests, in parts if you like: make test-all SHARD=3/8 JOBS=16. A run that was interrupted
# goes on where it was, as long as no source has changed.
SHARD ?= 1/1
PASSED := .cache/test-all-$(subst /,-of-,$(SHARD))
test-all: setup
	$(PYTEST) -m 'not gpu' --shard $(SHARD) --resume-file $(PASSED) -n $(JOBS) --dist worksteal tests/unit tests/multiproc
	$(PYTEST) -m 'not gpu' --shard $(SHARD) --resume-file $(PASSED)-faults -n 2 tests/faults

test-gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu

# Spark, Ray and Flink: an environment each, because they pin versions that differ. Spark and Flink need Java 17
# (Debian and Ubuntu: apt-get install openjdk-17-jre-headless).
setup-spark setup-ray setup-flink: setup-%: .venv-%/.installed

.venv-%/.installed: pyproject.toml
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[prepare-$*]' pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

test-engines: setup setup-spark setup-ray setup-flink
	$(PYTEST) -m engines -k embedded tests/engines
	.venv-spark/bin/python -m pytest -m engines -k spark tests/engines
	.venv-ray/bin/python -m pytest -m engines -k ray tests/engines
	.venv-flink/bin/python -m pytest -m engines -k flink tests/engines

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file mypy-tests.ini tests/gpu tests/engines benchmarks
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# For a machine that has torch and safetensors but can install nothing: copy .offline-site there beside src/, then
# PYTHONPATH=src:.offline-site python3 -m meshwright ... (OFFLINE_PYTHON is the version of that machine's Python).
OFFLINE_PYTHON ?= 3.12
offline-site: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target .offline-site --upgrade \
	  --python-version $(OFFLINE_PYTHON) --only-binary=:all: --constraint constraints.txt \
	  pydantic typer rich tomli-w jinja2 pytest pytest-timeout pytest-xdist hypothesis

# The outputs and pictures that README and docs quote: those of planning, and those of runs on this machine's CPU
# (on a quiet machine; a browser takes the report's screenshot). PAGES="tune.md scaling.md" measures these pages only.
docs-figures: setup
	$(BIN)/python benchmarks/docs_figures.py

docs-measured: setup
	$(BIN)/python benchmarks/docs_figures.py --measured $(PAGES)

docs: setup
	$(BIN)/zensical build --clean

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache site build dist
