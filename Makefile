# make train [ARGS="key=value ..."]   set up .venv where needed, then train gem_small
# make test  [ARGS="pytest options"]  the same set-up, then the tests
# make test-full                      the long simulations of the kernels, which make test leaves out
# make lint, make env, make venv      ruff; versions and what does not fit together; the set-up alone
#
# SET=cpu|gpu      the set of packages; without it gpu where an NVIDIA driver answers, else cpu
# TORCH=...        what pip shall install as torch, for example a wheel of the CPU build
# PYTHON=...       the Python that makes .venv

SHELL := /bin/bash
PYTHON ?= python3
SET ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo gpu || echo cpu)
ARGS ?=
TORCH ?=

VENV := .venv
BIN := $(VENV)/bin
# The stamps' names hold a digest of all that the set-up depends on: a changed pin runs it again, whatever the dates.
KEY := $(shell { cat requirements/*.txt scripts/install.py pyproject.toml; echo '$(TORCH)'; } | sha256sum | cut -c1-12)
STAMP := $(VENV)/.installed-$(SET)-$(KEY)
MOVIELENS := $(VENV)/.movielens-$(KEY)

# The two groups that name a model; Hydra takes a group once.
MODEL := $(if $(filter model=% experiment=%,$(ARGS)),,model=gem_small)

.PHONY: train test test-full lint env venv

train: $(STAMP) $(if $(filter data=movielens,$(ARGS)),$(MOVIELENS))
	$(BIN)/python train.py $(MODEL) $(ARGS)

test: $(STAMP) $(MOVIELENS)
	$(BIN)/python -m pytest $(ARGS)

test-full: $(STAMP)
	$(BIN)/python -m pytest -m long $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .

env: $(STAMP)
	$(BIN)/python -m gem.env

venv: $(STAMP)

$(STAMP): | $(BIN)/pip
	@[[ "$(SET)" == cpu || "$(SET)" == gpu ]] || { echo 'make: SET is "$(SET)"; it must be cpu or gpu'; exit 1; }
	@rm -f $(VENV)/.installed-* $(VENV)/.movielens-*
	@$(BIN)/python scripts/install.py $(SET) $(if $(TORCH),--torch '$(TORCH)')
	@touch $@

$(MOVIELENS): $(STAMP)
	@$(BIN)/python scripts/install.py movielens
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo 'make: $(PYTHON) could not make $(VENV); on Debian: apt-get install python3-venv'; exit 1; }
