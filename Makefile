# make demo    the main job on scikit-learn's digits, from a clean clone
# make test    the quick tests (what .ci/run calls)
# make help    the rest
#
# PYTHON=python3.12   another interpreter (3.10 or newer)
# PIP_ARGS=...        more options for pip, such as an index of your own
# ARGS=...            more options for svdc (demo) or pytest (test, test-slow)

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt $(PIP_ARGS)

.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-kill fuzz mutants gpu lint format bench docs draw site dist clean

help:
	@echo "make demo       install, then svdc sparsify recipes/digits.yaml into a new folder under runs/"
	@echo "make test       install with the test tools, then the quick tests"
	@echo "make test-slow  all tests, the slow ones too"
	@echo "make test-kill  100 runs killed at random moments and resumed, and places that fail; into benchmarks/results/reliability.md"
	@echo "make fuzz       10,000 mutations of each format that is read; into the same file; ARGS=--resume goes on after a stop"
	@echo "make mutants    100 small breaks of the code, and which no test notices; into benchmarks/results/mutants.md"
	@echo "make lint       ruff, pyright, bandit, and pip-audit where it reaches its data"
	@echo "make format     ruff's formatter and its safe fixes"
	@echo "make bench      the speed benchmarks; their figures go to benchmarks/results"
	@echo "make gpu        on a machine with a GPU: its tests and benchmarks, in slices that go on where the last one ended"
	@echo "make docs       docs/api.md from the docstrings"
	@echo "make draw       the page docs/demo, served here: draw a digit, three ONNX files answer (npm fetches onnxruntime-web)"
	@echo "make site       the documentation as a website, into site/"
	@echo "make dist       wheel and sdist into dist/"
	@echo "make clean      remove .venv and what builds and tests leave behind (not runs/)"

# Stamps: packages are installed again only if the declared or the pinned versions have changed.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "svdcompress needs Python 3.10 or newer; say which with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing svdcompress into $(VENV) (minutes on the first time: torch is large)"
	@$(PIP) -e ".[recipes,train]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the test tools into $(VENV)"
	@$(PIP) -e ".[dev]"
	@touch $@

# A run never overwrites another: it takes the next free folder.
demo: $(VENV)/.installed
	@out=runs/digits; n=2; while [ -e "$$out" ]; do out=runs/digits-$$n; n=$$((n + 1)); done; \
	echo "svdc sparsify recipes/digits.yaml --out $$out $(ARGS)"; \
	$(BIN)/svdc sparsify recipes/digits.yaml --out "$$out" $(ARGS)

# One thread for each worker, as the tests' tensors are small; an idle worker takes over tests from a busier one.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed-dev
	$(PYTEST) $(ARGS)

test-kill: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/kill/kill.py $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/kill/places.py

mutants: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/mutants.py $(ARGS)

fuzz: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/bandit -q -r svdcompress --skip B101  # asserts tell the type checker what holds; no input is checked by one
	$(BIN)/python tests/audit.py constraints.txt

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/speed.py $(ARGS)

# Uses the machine's own Python, which has a torch for the GPU. ARGS="--cifar FOLDER --resnet FOLDER" for the long rows.
gpu:
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) benchmarks/gpu.py $(ARGS)

docs: $(VENV)/.installed-dev
	$(BIN)/python docs/api.py

site: $(VENV)/.installed-dev
	@$(PIP) -e ".[docs]"
	$(BIN)/python docs/website.py

draw:
	$(PYTHON) docs/demo/build.py
	$(PYTHON) -m http.server --directory docs/demo --bind 127.0.0.1 8765

dist: $(VENV)/.installed-dev
	$(BIN)/python -m hatchling build -d dist

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
