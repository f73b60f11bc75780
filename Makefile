# `make demo` and `make test` are the two commands of the README; both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-deep lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"rota needs Python 3.11 or later, and $(PYTHON) is {v.major}.{v.minor}; try: make PYTHON=python3.11 setup")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing rota into $(VENV) (once; a minute or two)"
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --editable '.[dev]'
	@touch $(STAMP)

demo: setup
	@$(BIN)/python examples/quickstart.py

test: setup
	@$(BIN)/pytest

# The long matrices: 20,000 random plans (about half an hour on one core).
test-deep: setup
	@ROTA_PLAN_CASES=20000 $(BIN)/pytest tests/numerics/test_plans.py --timeout 7200

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
