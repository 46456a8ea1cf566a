# The verbs of the project. Each makes its own virtual environment in .venv when it needs one.
PYTHON ?= python3
BIN := .venv/bin
TRAINERS := .venv-trainers/bin
OLDEST := .venv-oldest/bin
INSTALL := pip install --quiet --disable-pip-version-check --constraint constraints.txt
PIP := $(BIN)/$(INSTALL)

.PHONY: help reproduce test test-slow kills package test-trainers test-oldest lint types docs format benchmarks decisions clean
.DEFAULT_GOAL := help

help:  ## Say what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile

reproduce: .venv/.paper  ## Run the paper's experiments on embedded data; figures and claims in runs/
	$(BIN)/equilibrate-paper reproduce

test: .venv/.dev  ## Run the tests, and every example of the documentation
	$(BIN)/python -m pytest --quiet --numprocesses 2 --dist worksteal

test-slow: .venv/.dev  ## Run the tests that take longest: several processes, kills, real data
	$(BIN)/python -m pytest --quiet --numprocesses 2 --dist worksteal -m slow

kills: .venv/.dev  ## Kill a recorded run at a hundred random moments; nothing may be lost
	EQUILIBRATE_KILLS=100 $(BIN)/python -m pytest --quiet -m slow tests/record/test_recorder.py -k kills

package: .venv/.dev  ## Build both packages into dist/, and install the library without extras to check it
	rm -rf dist
	$(BIN)/hatchling build
	cd paper && ../$(BIN)/hatchling build --target wheel --directory ../dist
	$(BIN)/python .ci/check_package.py

test-trainers: .venv-trainers/.trainers  ## Run the tests with Lightning, Hugging Face and accelerate, and check types
	$(TRAINERS)/python -m pytest --quiet tests/trainers
	$(TRAINERS)/pyright --project tests/trainers --pythonpath $(TRAINERS)/python

# Not part of .ci/run: this torch brings gigabytes of CUDA.
test-oldest: .venv-oldest/.oldest  ## Run all tests with the oldest versions that pyproject.toml allows
	$(OLDEST)/python -m pytest --quiet -m ''

lint: .venv/.dev  ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev  ## Check types
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: .venv/.dev  ## Build the documentation into site/, warnings being errors
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

format: .venv/.dev  ## Put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmarks: .venv/.dev  ## Measure what it costs, as ratios
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/tables.py

decisions: .venv/.dev  ## Compare rules for lowering the learning rate on processes with known truth
	$(BIN)/python benchmarks/decisions.py

clean:  ## Take away what the verbs made, except runs/
	rm -rf .venv .venv-trainers .venv-oldest site .pytest_cache .ruff_cache .hypothesis

.venv/.made:
	$(PYTHON) -m venv .venv
	@touch $@

# torch is named so that pip takes the pinned build first and alone.
.venv/.paper: .venv/.made pyproject.toml paper/pyproject.toml constraints.txt
	$(PIP) torch --editable . --editable paper
	@touch $@

.venv/.dev: .venv/.made pyproject.toml paper/pyproject.toml constraints.txt
	$(PIP) torch --editable '.[dev]' --editable paper
	@touch $@

# An environment of its own: packages that trainers import if they find them must fit to torch.
.venv-trainers/.made:
	$(PYTHON) -m venv .venv-trainers
	@touch $@

.venv-trainers/.trainers: .venv-trainers/.made pyproject.toml constraints.txt
	$(TRAINERS)/$(INSTALL) torch --editable '.[trainers]'
	@touch $@

.venv-oldest/.oldest: pyproject.toml paper/pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	$(OLDEST)/pip install --quiet --disable-pip-version-check --constraint constraints-oldest.txt \
	  torch --editable . --editable paper pytest pytest-xdist hypothesis
	@touch $@
