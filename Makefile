# `make train` and `make test` need python3 >= 3.11 with venv, git, make and, the first time, a network.
PYTHON ?= python3
VENV ?= .venv
# A GPU host wants one more: make train EXTRAS=data,test,cuda12 (or cuda13).
EXTRAS ?= data,test
# Passed on: make test ARGS='-k layers', make train ARGS='--config.steps=20'.
ARGS ?=

# An environment that forbids Python to write bytecode has every process parse all of jax again: 5.1 s of a core to start
# one instead of 1.8, and the tests start a hundred and more. It is written here, and nothing of it beside the sources.
ifdef PYTHONDONTWRITEBYTECODE
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/.cache/bytecode
endif

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.PHONY: help train test test-layouts test-faults test-slurm lint types venv clean

BIN := $(VENV)/bin
CODE := $(sort $(dir $(wildcard jaxscale/*.py configs/*.py scripts/*.py tests/*.py)))

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 15
	@echo "  PYTHON=python3.12 make test picks an interpreter; EXTRAS=data,test,cuda12 adds CUDA; ARGS='...' is passed on"

train: venv  ## train a tiny model on this machine, into runs/tiny
	$(BIN)/python scripts/train.py --config configs/tiny.py --workdir runs/tiny $(ARGS)

# Two processes, each with whole files, whose tests share compiled functions, in the order of tests/conftest.py.
test: venv  ## run the tests on 8 virtual CPU devices
	$(BIN)/pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder $(ARGS)

test-layouts: venv  ## schedules of a pipeline, and products in 8 bits, on every mesh: half an hour, for the night
	$(BIN)/pytest --numprocesses=2 -m nightly tests/parallel tests/step $(ARGS)

# Debian's packages, if they can be had; without them the tests say so and are skipped. slurmd needs root.
SUDO := $(if $(filter 0,$(shell id -u)),,sudo -n)

test-slurm: venv  ## scripts/train.slurm on a SLURM of this machine, installed if it can be (Debian, Ubuntu; root)
	@PATH="$$PATH:/usr/sbin:/sbin"; command -v munged >/dev/null && command -v slurmctld >/dev/null && command -v slurmd >/dev/null || { \
		echo "installing slurm-wlm and munge"; \
		export DEBIAN_FRONTEND=noninteractive; \
		$(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; } || \
		echo "make: slurm-wlm and munge cannot be installed here (they need apt-get, root and a network)" >&2
	@if $(SUDO) true 2>/dev/null; then run="$(SUDO)"; else run=; fi; \
		$$run env PYTHONDONTWRITEBYTECODE=1 $(BIN)/pytest -m slurm -s tests/slurm $(ARGS)

# FAULTS=34 makes docs/reliability.md's campaign.
FAULTS ?= 1
test-faults: venv  ## kill and damage runs at random moments, FAULTS times each; one takes 3 minutes
	JAXSCALE_FAULTS=$(FAULTS) $(BIN)/pytest -m faults tests/faults $(ARGS)

lint: venv  ## ruff: rules and formatting
	$(BIN)/ruff check $(CODE) kernels
	$(BIN)/ruff format --check $(CODE) kernels

types: venv  ## mypy
	$(BIN)/mypy $(CODE)

clean:  ## remove the environments and every cache; runs/ stays
	rm -rf .venv .venv-* .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment is as good as new if it has the same Python, stands where it was made (its scripts name its folder) and
# was filled from the same text. Contents, not times: a fresh clone or a switch of branches makes no work where nothing
# changed, and then no network is needed.
PYTHON_ID := import sys; print(sys.base_prefix, *sys.version_info[:2])

venv:
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "make: $(PYTHON) is not installed; choose another: PYTHON=python3.12 make $(MAKECMDGOALS)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: jaxscale needs Python >= 3.11, and $(PYTHON) is $$("$(PYTHON)" --version 2>&1);" \
			"choose another: PYTHON=python3.12 make $(MAKECMDGOALS)" >&2; exit 1; }
	@place="$(CURDIR) $$("$(PYTHON)" -c '$(PYTHON_ID)')"; \
	filled="$(EXTRAS) $$(cat setup.cfg pyproject.toml constraints.txt | cksum)"; \
	if ! [ "$$place" = "$$(cat $(VENV)/made-at 2>/dev/null || true)" ] || ! $(BIN)/python -c '' 2>/dev/null; then \
		"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { \
			echo "make: $(PYTHON) has no venv; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }; \
		echo "making $(VENV) with $$("$(PYTHON)" --version)"; \
		"$(PYTHON)" -m venv --clear $(VENV); \
		echo "$$place" > $(VENV)/made-at; \
	fi; \
	if ! [ "$$filled" = "$$(cat $(VENV)/filled-from 2>/dev/null || true)" ]; then \
		echo "installing jaxscale[$(EXTRAS)] into $(VENV)"; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv; \
		$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt --build-constraints constraints.txt \
			-e '.[$(EXTRAS)]' || { \
			echo "make: uv could not install; trying pip, which is slower but knows this machine's pip.conf" >&2; \
			$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'; }; \
		echo "$$filled" > $(VENV)/filled-from; \
	fi
