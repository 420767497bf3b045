# What a person or CI does with this checkout; `make help` lists it. Everything goes into .venv and .tools, but for what
# apt installs and the caches of the oracles and MinIO under ~/.cache. A target whose inputs have not changed does nothing.
#
#   PYTHON=...       the interpreter that .venv is made from; else python3 or a newer one by name, 3.11 at least
#   PYTEST_ARGS=...  more options for pytest, as PYTEST_ARGS="-k journal -x"
#   WORKERS=...      processes that share the tests, 4 by default, since many wait; 0 for one and the same, as with --pdb
#   SEEDS=... FIRST=...   for `make simulate`: how many seeds, from which
#   KILLS=...        for `make torture`
#   RUNS=...         for `make zombies`
#   BENCH_ARGS=...   for `make bench`: "--quick" takes a fifth of the messages, "--write" puts the table into docs/performance.md
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
export PYTHON
# Some workplaces set it; then each of the thousand processes that tests start compiles all it imports: a second more of each.
unexport PYTHONDONTWRITEBYTECODE
# uv brings certificates of its own; a machine's may hold more, as that of a company's proxy.
ifneq ($(wildcard /etc/ssl/certs/ca-certificates.crt),)
export UV_SYSTEM_CERTS := 1
export UV_NATIVE_TLS := 1
endif

BIN := .venv/bin
INSTALL := pyproject.toml requirements/install.sh requirements/uv.sh
PYTEST := $(BIN)/python -m pytest
# A file's tests stay in one process: they share servers and brokers that are dear to start. tests/conftest.py orders the files.
SHARED = $(PYTEST) -n $(or $(WORKERS),4) --dist loadfile --no-loadscope-reorder

# Tests that need no server and next to no process: formats, and the rules of text that a change breaks unseen. Those that
# were changed since main come on top.
PURE := tests/unit tests/format tests/journal/test_entry.py tests/journal/test_reader.py tests/cli/test_values.py \
	$(addprefix tests/packaging/test_,docs.py repository.py support.py words.py)
CHANGED = $(shell git diff --name-only --diff-filter=d $$(git merge-base HEAD main 2>/dev/null || echo HEAD) -- 'tests/*/test_*.py'; \
	git ls-files --others --exclude-standard -- 'tests/*/test_*.py')

.PHONY: help setup demo quick test test-all simulate torture zombies system lint format lock bench house minio localstack docs docs-site clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.installed-runtime ## .venv with everything that users may want: S3, Spark, SQL

demo: .venv/.installed-light ## the whole story on a local folder, without any server (two minutes at most)
	@$(BIN)/tiered demo

# Each process loads all that tests import, which is a tenth of the whole.
quick: WORKERS ?= 2
quick: .venv/.installed-test ## under a minute: lint, types, pure tests, and those changed since main; no Java, MinIO or Spark
	@$(MAKE) lint
	@$(SHARED) -q -m "not slow and not java and not go and not spark" --hypothesis-profile=quick $(PURE) $(CHANGED) $(PYTEST_ARGS)

test: .venv/.installed-test system ## every test but the slow ones, with what they need (JDK, Maven, MinIO) set up first
	@$(SHARED) -m "not slow" --hypothesis-profile=short $(PYTEST_ARGS)

test-all: .venv/.installed-test system ## the slow tests too
	@requirements/system.sh chromium
	@requirements/system.sh containers
	@$(SHARED) $(PYTEST_ARGS)

simulate: .venv/.installed-test ## SEEDS=100000 seeded runs of writers, faults and crashes on a virtual clock, in parallel
	@$(BIN)/python -m tests.simulation $(or $(FIRST),0) --seeds $(or $(SEEDS),1000)

torture: .venv/.installed-test system ## KILLS=500 kills of real processes, at named points and at random, on a folder and S3 servers
	@TIERED_TORTURE_KILLS=$(or $(KILLS),500) $(PYTEST) tests/torture $(PYTEST_ARGS)

zombies: .venv/.installed-test system ## RUNS=100 writers that sleep past their lease while another works, on a folder and S3 servers
	@TIERED_ZOMBIE_RUNS=$(or $(RUNS),100) $(PYTEST) tests/torture/test_zombies.py -s -o faulthandler_timeout=0 $(PYTEST_ARGS)

system: ## JDK and Maven (with apt, as root), the RocketMQ and Kafka oracles, MinIO; says what it has to leave out
	@requirements/system.sh

# mypy as two processes, if they start within the three seconds that it allows them: a busy machine may be slower.
lint: .venv/.installed-test ## ruff, mypy, import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --num-workers 2 || $(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.installed-test ## repairs what ruff can repair
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

lock: ## compiles requirements/*.txt from pyproject.toml; UPGRADE=1 takes newer versions
	@uv=$$(requirements/uv.sh) && $$(requirements/python.sh) requirements/lock.py "$$uv" $(if $(UPGRADE),--upgrade)

bench: .venv/.installed-test ## BENCH_ARGS="--quick --write": the table of docs/performance.md, both sides in turn, as ratios
	@$(BIN)/python tests/peer/figures.py $(BENCH_ARGS)

house: .venv/.installed-test ## lines of code, docstrings and comments by package; modules, names used twice, files that a command enters
	@$(BIN)/python tests/house.py --entered

minio: ## MinIO in the foreground, for trying things: prints its address and keys
	@TIERED_REQUIRE=1 requirements/system.sh minio && exec localstack/minio.sh run

localstack: ## LocalStack without Docker, in an environment of its own; prints the variables to export
	@$$(requirements/python.sh) localstack/run_host.py up

docs: .venv/.installed-runtime ## the generated pages of docs/ again
	@$(BIN)/python -m tests.support.generated

docs-site: .tools/site/.installed ## the documentation as a site, in build/site; a broken link or a page that docs/index.md lacks fails
	@NO_MKDOCS_2_WARNING=1 .tools/site/bin/mkdocs build --strict --config-file docs/site/mkdocs.yml

clean: ## removes .venv, .tools and every cache in the checkout
	rm -rf .venv .tools dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed-%: requirements/%.txt $(INSTALL)
	@requirements/install.sh $*

.tools/site/.installed: requirements/site.txt
	rm -rf $(@D)
	$$(requirements/python.sh) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	touch $@
