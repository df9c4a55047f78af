# make demo  sets everything up, then compares single, ddp, ps and hybrid on this machine
# make test  sets everything up, then runs the tests
# make bench sets everything up, then compares speeds with PyTorch's DDP: some minutes
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# PyTorch and the ranks of a test share few cores: one BLAS thread each unless told otherwise.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test bench test-slow lint setup clean

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "Python 3.11, 3.12 or 3.13 is needed, and $(PYTHON) is %d.%d: make PYTHON=python3.11 ..." % v)'
	@echo "Installing into $(VENV): minutes, for PyTorch is a few GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable . --group dev
	@touch $@

demo: $(READY)
	$(BIN)/poseidon demo

# Slow tests have the machine to themselves.
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

bench: $(READY)
	$(BIN)/poseidon bench bench.fresh=true

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV)
