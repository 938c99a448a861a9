# make help

PYTHON ?= python3
VENV ?= .venv
SWEEP ?= sweeps/dispatch.toml
export PYTHON VENV

.PHONY: help setup run lint test test-gpu
.DEFAULT_GOAL := help

help:
	@echo 'make setup      make $(VENV) and install kdabench into it (does nothing when it is current)'
	@echo 'make run        sweep, fit, write the policy, plot and report: kdabench run $(SWEEP)'
	@echo 'make lint       ruff check, ruff format --check, mypy'
	@echo 'make test       setup, lint and the tests that need no GPU'
	@echo 'make test-gpu   the tests that need an NVIDIA GPU'
	@echo 'variables: PYTHON=$(PYTHON)  VENV=$(VENV)  SWEEP=$(SWEEP)'

setup:
	@scripts/setup.sh

run: setup
	@$(VENV)/bin/kdabench run $(SWEEP)

lint: setup
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/mypy --no-error-summary

test: lint
	@$(VENV)/bin/python -m pytest --numprocesses auto --dist loadfile

test-gpu: setup
	@$(VENV)/bin/python -m pytest -m gpu
