# Each target makes its own environment first; a fresh machine needs Python 3.11+, make and a C
# compiler only. The demo has a small one of its own, unless .venv is there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
DEMO := $(if $(wildcard $(READY)),$(VENV),.venv-demo)

.PHONY: demo check test test-all test-versions reports docs lint clean

# MADGRADW over AdamW's learning rates, with a schedule and without one. About a minute on two cores.
DEMO_METHODS := madgradw,adamw,madgradw-schedule-free,schedulefree-adamw,sgd
demo: $(DEMO)/ready
	$(DEMO)/bin/cubegrad compare digits --methods $(DEMO_METHODS) --decay 0 --seeds 8 --out runs/demo

SLOW := browser or compilation or exhaustive or plots or processes or ray or site or training

# At most 8 cases of each test that has none of the markers of slow tests.
check: lint
	$(BIN)/pytest -n 2 --cases 8 -m "not ($(SLOW))"

test: lint
	$(BIN)/pytest -n 2

test-all: lint
	CUBEGRAD_EXAMPLES=10 $(BIN)/pytest -n 2

# On other versions of Python and torch: the environments are new, large and deleted afterwards.
test-versions:
	$(PYTHON) tests/versions.py

# The committed reports again, from their records, and the page over all of them.
reports: $(READY)
	for runs in $(dir $(wildcard docs/results/*/commands.txt)); do $(BIN)/cubegrad report $$runs || exit 1; done
	cd docs/results && rm -f */report/*.svg */report/*-lr.png */report/report.md
	$(BIN)/python benchmarks/evidence/evidence.py

# The documentation site in out/site; a warning or a broken link is an error. (The variable silences the
# notice that mkdocs-material will be retired in May 2027.)
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open out/site/index.html"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

NATIVE := setup.py $(wildcard src/cubegrad/backends/native/*.[ch])
PIP_INSTALL := install --disable-pip-version-check -c constraints.txt

$(READY): pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	@echo "Installing everything into $(VENV): 4 GB and CUDA's libraries, some minutes, the first time only."
	$(BIN)/pip $(PIP_INSTALL) -e ".[dev,jax,study,problems,ray,peers,search,tensorboard,recipes,docs]"
	touch $@

.venv-demo/ready: pyproject.toml constraints.txt Makefile $(NATIVE)
	$(PYTHON) -m venv .venv-demo
	@echo "Installing torch, scikit-learn and matplotlib into .venv-demo, the first time only."
	@echo "On Linux 2.8 GB of downloads; see CONTRIBUTING.md for 0.3 GB without CUDA."
	.venv-demo/bin/pip $(PIP_INSTALL) -e ".[study]" schedulefree
	touch $@

clean:
	rm -rf $(VENV) .venv-demo build dist out src/*.egg-info
