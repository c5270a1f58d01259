# Each target makes its own environment first; a fresh machine needs Python 3.11+, make and a C
# compiler only.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo check test test-all reports lint clean

demo: $(READY)
	$(BIN)/cubegrad compare digits

SLOW := browser or compilation or exhaustive or plots or processes or ray or training

# At most 8 cases of each test that has none of the markers of slow tests.
check: lint
	$(BIN)/pytest -n 2 --cases 8 -m "not ($(SLOW))"

test: lint
	$(BIN)/pytest -n 2

test-all: lint
	CUBEGRAD_EXAMPLES=10 $(BIN)/pytest -n 2

# The committed reports again, from their records.
reports: $(READY)
	for runs in $(dir $(wildcard docs/results/*/commands.txt)); do $(BIN)/cubegrad report $$runs || exit 1; done
	rm -f docs/results/*/report/*.svg

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

NATIVE := setup.py $(wildcard src/cubegrad/backends/native/*.[ch])

$(READY): pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,jax,study,problems,ray,peers]"
	touch $@

clean:
	rm -rf $(VENV) build dist out src/*.egg-info
