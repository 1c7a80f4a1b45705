# Every target sets itself up: a virtual environment in .venv with the packages that pyproject.toml names.
# Needs Python 3.11 or newer with pip, and make. `make PYTHON=python3.12 ...` chooses another interpreter.

PYTHON ?= python3
TESTS ?= tests
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test check prove bench clean

demo: $(READY)  ## a session is killed in the middle of a step, resumed, and compared with plain decoding
	@$(BIN)/agentkv demo

test: $(READY)  ## the tests, but for the slow ones and those that need a GPU
	$(BIN)/python -m pytest -m "not slow and not gpu" $(TESTS)

check: $(READY)  ## style and types
	scripts/check

prove: $(READY)  ## all tests, the slow ones included
	$(BIN)/python -m pytest --timeout 3600 $(TESTS)

bench: $(READY)  ## the numbers of benchmarks/README.md
	for script in benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

clean:  ## remove the environment and all caches of this directory (converted models stay in the user's cache)
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build *.egg-info

# torch comes first and pinned: where a CPU build of that version is offered it is taken, and nothing replaces it later.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("agentkv needs Python 3.11 or newer: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
