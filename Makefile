# `make demo` and `make test` are the two commands of the README; both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-deep chaos lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"rota needs Python 3.11 or later, and $(PYTHON) is {v.major}.{v.minor}; try: make PYTHON=python3.11 setup")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing rota into $(VENV) (once; a minute or two)"
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --editable '.[dev]'
	@touch $(STAMP)

demo: setup
	@$(BIN)/python examples/quickstart.py

# What starts processes mostly waits, so that three run at a time; what looks at clocks has the machine to itself.
test: setup
	@$(BIN)/pytest -n 3 --dist worksteal -m 'not alone and not deep' tests/multiprocess tests/integration tests/numerics tests/property tests/unit
	@$(BIN)/pytest -m 'alone and not deep' tests

# The long ones: every strategy on every family over 2 and 4 processes, large models, and 20,000 random plans (about an hour).
test-deep: setup
	@$(BIN)/pytest -p no:cacheprovider -m deep tests
	@pids=; for shard in 0/2 1/2; do \
	  ROTA_PLAN_CASES=20000 ROTA_PLAN_SHARD=$$shard $(BIN)/pytest -p no:cacheprovider tests/numerics/test_plans.py & \
	  pids="$$pids $$!"; \
	done; for pid in $$pids; do wait $$pid || exit 1; done

# Seeded faults, on this machine and on a Ray cluster on it (about ten minutes; as root also full disks and cut networks),
# and 200 system calls that fail (about an hour).
chaos: setup
	@$(BIN)/python -m bench.chaos

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
