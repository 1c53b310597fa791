# Every target sets up what it needs in .venv; nothing has to be installed by hand.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup train train-real test test-full test-crash test-vllm test-trl test-min test-newest test-gpu wheels-gpu rehearse-gpu check docs conform bench predict estimators lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once; a minute or two) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# DeepSpeed has no wheel: its tests are skipped where it cannot be installed, and those of a release without its tools
ENGINES := $(VENV)/.engines
$(ENGINES): $(READY)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[deepspeed]' \
		|| echo "DeepSpeed could not be installed; the tests that need it are skipped"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[trackers]'
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[release]' \
		|| echo "build and twine could not be installed; the tests of a release are skipped"
	@touch $@

setup: $(READY)  ## make the environment

train: $(READY)  ## train the embedded demo (ARGS="--max_steps 50" for overrides)
	@$(BIN)/python recipes/grpo.py $(ARGS)

train-real: $(READY)  ## teach SmolLM2-135M to add, on the CPU (ARGS="--demo last_word": another problem)
	@$(BIN)/python recipes/grpo.py --demo sums $(ARGS)

# the tests of a file share launches and trained runs: they stay with one worker. (`--dist loadgroup` would split them:
# pytest 9.2 no longer reads where pytest-xdist 3.8 writes a group.) tests/conftest.py puts the longest files first
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(ENGINES)  ## run the tests: every kind of proof, a covering choice of splits (ARGS for pytest; WORKERS=0 for one process)
	@$(BIN)/python -m pytest -q $(PARALLEL) $(ARGS)

test-full: $(ENGINES)  ## run all tests: the full matrix of splits, every engine, stop and kill, the whole demo (three quarters of an hour)
	@$(BIN)/python -m pytest -q -rx --full $(PARALLEL) $(ARGS)

test-crash: $(READY)  ## kill runs at random moments, 50 times, and compare bits (about a quarter of an hour)
	@$(BIN)/python -m pytest -q tests/crash --full --kills 50 $(ARGS)

VLLM := .venv-vllm
$(VLLM)/.ready: pyproject.toml tests/vllm/requirements.txt
	@echo "Setting up $(VLLM) (once; some minutes, 4 GB) ..."
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -q --disable-pip-version-check -r tests/vllm/requirements.txt
	@$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec  # builds for another torch
	@$(VLLM)/bin/python -m pip install -q --disable-pip-version-check -e .
	@touch $@

test-vllm: $(VLLM)/.ready  ## rollouts from a real vLLM engine on the CPU, in an environment of its own
	@$(VLLM)/bin/python -m pytest -q tests/vllm $(ARGS)

# What has to hold beside another TRL: its methods, training, the promise. What it leaves out needs an environment of its
# own (recipes, packaging) or takes long (--full)
VERSIONED := tests/unit tests/trainer tests/invariance

TRL ?= 1.15.0
OTHER := .venv-trl-$(TRL)
$(OTHER)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(OTHER) (once; a minute or two) ..."
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@sed '/^trl==/d' constraints.txt > $(OTHER)/constraints.txt
	@$(OTHER)/bin/python -m pip install -q --disable-pip-version-check -c $(OTHER)/constraints.txt torch
	@$(OTHER)/bin/python -m pip install -q --disable-pip-version-check -c $(OTHER)/constraints.txt -e '.[dev,trackers]'
	@$(OTHER)/bin/python -m pip install -q --disable-pip-version-check -c $(OTHER)/constraints.txt 'trl==$(TRL)'
	@touch $@

test-trl: $(OTHER)/.ready  ## unit, trainer and invariance tests beside another TRL (TRL=1.15.0), in an environment of its own
	@$(OTHER)/bin/python -m pytest -q $(PARALLEL) $(VERSIONED) $(ARGS)

LOWEST := .venv-min
$(LOWEST)/.ready: pyproject.toml
	@echo "Setting up $(LOWEST) (once; some minutes, several GB: this torch may bring CUDA) ..."
	@test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	@sed -n '/^dependencies/,/^]/s/^ *"\([a-z]*\)>=\([0-9.]*\).*/\1~=\2.0/p' pyproject.toml > $(LOWEST)/constraints.txt
	@$(LOWEST)/bin/python -m pip install -q --disable-pip-version-check -c $(LOWEST)/constraints.txt -e '.[dev,trackers]'
	@touch $@

test-min: $(LOWEST)/.ready  ## the same beside the lowest versions that pyproject.toml names
	@$(LOWEST)/bin/python -m pytest -q $(PARALLEL) $(VERSIONED) $(ARGS)

# Every run brings it up to date
NEWEST := .venv-newest
UPGRADE := $(NEWEST)/bin/python -m pip install -q --disable-pip-version-check --upgrade --upgrade-strategy eager

test-newest:  ## the tests of `make test` beside the newest versions that pip resolves without constraints (7 GB: CUDA)
	@test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	@$(UPGRADE) -e '.[dev,trackers]'
	@$(UPGRADE) -e '.[deepspeed]' || echo "DeepSpeed could not be installed; the tests that need it are skipped"
	@$(UPGRADE) trl transformers  # also those that pyproject.toml leaves out; pip says so
	@$(NEWEST)/bin/python -m pytest -q $(PARALLEL) $(ARGS)

# A machine with a GPU and without a network or make: docs/tools.md shows the two commands of test-gpu
GPU := .venv-gpu
GPU_PYTHON ?= 3.12

wheels-gpu:  ## with a network: fill wheels/ for `make test-gpu` on a machine without (GPU_PYTHON=3.12, its Python)
	@$(PYTHON) -m tests.gpu.environment --download $(GPU_PYTHON)

test-gpu:  ## on a GPU, in at most 20 minutes and without a network: tests/gpu, into gpu.json (ARGS="--parts figures": speed; TOY=1)
	@$(PYTHON) -m tests.gpu.environment
	@$(GPU)/bin/python -m tests.gpu.measure $(if $(TOY),--toy) $(ARGS)

REHEARSAL := .venv-rehearsal
REHEARSAL_PYTHON ?= python3.12
$(REHEARSAL)/.ready: tests/gpu/machine.txt
	@echo "Setting up $(REHEARSAL) (once; some minutes, 5 GB) ..."
	@$(REHEARSAL_PYTHON) -m venv --clear $(REHEARSAL)
	@$(REHEARSAL)/bin/python -m pip install -q --disable-pip-version-check -r tests/gpu/machine.txt
	@touch $@

rehearse-gpu: $(REHEARSAL)/.ready wheels-gpu  ## test-gpu at toy size, in an environment that holds what such a machine does
	@$(MAKE) --no-print-directory test-gpu TOY=1 PYTHON=$(REHEARSAL)/bin/python ARGS="--parts tests,figures,processes --seconds 7200 $(ARGS)"

check: $(READY)  ## show that the split does not matter, on the demo (ARGS="--against trl")
	@$(BIN)/grpo-ext check $(ARGS)

docs: $(READY)  ## write the listings and tables that documents have from the code
	@$(BIN)/python -m tests.support.trace_calls
	@$(BIN)/python -m tests.support.setting_tables

conform: $(READY)  ## compare the updates of several GRPO trainers with the exact one (ARGS="adapter.py": yours; about 10 minutes, with what it installs)
	@$(BIN)/python -m tests.conform $(ARGS)

bench: $(READY)  ## the reference shapes against stock TRL, by phase (under 20 minutes; ARGS=--long for all of them)
	@$(BIN)/python -m tests.bench $(ARGS)

predict: $(READY)  ## whether what a setting does to one step says what it does to a run (the demo: half an hour; ARGS="--demo sums": hours)
	@$(BIN)/python -m tests.bench.predict $(ARGS)

estimators: $(READY)  ## which objective each setting optimises, on a policy that can be enumerated (about 20 minutes)
	@$(BIN)/python -m tests.estimators $(ARGS)

lint: $(READY)  ## ruff, mypy, sizes of files and functions, code tokens of the package
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m tests.support.sizes

format: $(READY)  ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove the environment and caches
	rm -rf $(VENV) .conform $(VLLM) .venv-trl-* $(LOWEST) $(NEWEST) $(GPU) $(REHEARSAL) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
