# Every command of the repository. `make help` lists them.
#
#   PYTHON   the interpreter that .venv is made with    make test PYTHON=python3.12
#   ARGS     passed to what is run                      make test ARGS="-k lock"
#   JOBS     how many tests run at once                 make test JOBS=0   (one after the other, in one process)
#   MARKS    which tests run, by their markers          make test MARKS=   (all of them)
#   STORE    where a sample keeps its leases            make demo STORE=redis   (postgres, kubernetes, or the URL of any store)
#   APP      which sample is left running               make serve APP=django_reports   (or starlette_leader)

PYTHON  ?= python3
VENV    ?= .venv
ARGS    ?=
STORE   ?=
APP     := fastapi_orders
# Most tests wait for something most of the time, so there are more jobs than processors.
JOBS    ?= $(shell $(PYTHON) -c 'import os; print(2 * os.cpu_count() + 1)')
MARKS   ?= not exhaustive
PYTHONS := 3.11 3.12 3.13
NEWER   := 3.13 3.12

RUN     := $(VENV)/bin/python
PIP     := $(RUN) -m pip install -qq --disable-pip-version-check -c constraints.txt
MADE    := $(VENV)/.made
DEMO    := $(VENV)/.demo
DEV     := $(VENV)/.dev
NEWEST  := $(VENV)/.newest
OLDEST  := $(VENV)/.oldest
QUICK   := tests/unit tests/contract tests/integrations tests/repo
SAMPLES := _demo _page _sample
TESTING := httpx2 hypothesis psutil pytest pytest-asyncio pytest-timeout pytest-xdist
FOR_DJANGO := $(TESTING) celery django-redis 'psycopg[binary]' psycopg2-binary pytest-django
LISTS   := $(wildcard core/pyproject.toml integrations/*/pyproject.toml) constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo demo-django serve test test-fast test-k8s test-django on-django test-all test-oldest on-oldest check docs bench torture clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# What starts a server for the demo is part of the development environment.
demo demo-django serve: $(if $(filter redis% unix% postgres% kubernetes%,$(STORE)),$(DEV),$(DEMO))

demo: ## run the sample shop on several workers and show what its locks prevent
	@$(RUN) -m sample_apps.fastapi_orders.demo $(if $(STORE),--store $(STORE)) $(ARGS)

demo-django: ## start commands and views of a Django project on many processes, and show what its leases prevent
	@$(RUN) -m sample_apps.django_reports.demo $(if $(STORE),--store $(STORE)) $(ARGS)

serve: ## leave the sample shop running, or APP=starlette_leader, or APP=django_reports
	@$(RUN) -m sample_apps.serve $(APP) $(if $(STORE),--store $(STORE)) $(ARGS)

# Tests start hundreds of Python programs: none should compile again what another one has, whatever the environment says.
test test-fast test-k8s on-django on-oldest: export PYTHONDONTWRITEBYTECODE :=

# Tests that share what takes long to start run in one process.
test: $(DEV) ## run the tests
	$(RUN) -m pytest -n $(JOBS) --dist loadgroup -m "$(MARKS)" $(ARGS)
	$(if $(ARGS),,@$(MAKE) --no-print-directory test-django)

# Collection is a good part of its time, so it looks into these folders only.
test-fast: $(DEV) ## run the quick tests, which need no server
	$(RUN) -m pytest -n $(JOBS) --dist loadgroup -m "not slow and not server and not exhaustive" $(ARGS) $(QUICK)

test-k8s: $(DEV) ## run the tests on a real Kubernetes API server, which KUBEBUILDER_ASSETS names
	@test -n "$$KUBEBUILDER_ASSETS" || { echo "Set KUBEBUILDER_ASSETS to a folder with kube-apiserver and etcd, such as 'setup-envtest use -p path' makes." >&2; exit 1; }
	$(RUN) -m pytest -n $(JOBS) --dist loadgroup -k kubernetes $(ARGS)

# Django 6 needs Python 3.12. Where the development environment has that, it has the newest Django too.
test-django: $(MADE) ## run the tests of the Django package with the newest Django, if Python 3.12 or newer is installed
	@if $(RUN) -c "import sys; sys.exit(sys.version_info < (3, 12))"; then \
	  echo "The newest Django is that of $(VENV)."; exit 0; fi; \
	for python in $(NEWER:%=python%) $(foreach each,$(NEWER),"$$HOME"/.pyenv/versions/$(each).*/bin/python); do \
	  "$$python" -c "import sys; sys.exit(sys.version_info < (3, 12))" 2>/dev/null && exec $(MAKE) --no-print-directory on-django VENV=.venv-django PYTHON="$$python"; \
	done; echo "The newest Django: NOT TESTED, no Python 3.12 or newer on PATH or under ~/.pyenv/versions"; test -z "$$CI"

on-django: $(NEWEST)
	$(RUN) -m pytest -n $(JOBS) -m "not server and not exhaustive" tests/django $(ARGS)

test-all: ## run all tests, also the exhaustive ones, on every supported Python that is installed
	@$(MAKE) --no-print-directory -k $(PYTHONS:%=test-%) MARKS=

test-oldest: ## run the tests of the web frameworks' packages with the oldest frameworks that these declare
	@$(MAKE) --no-print-directory on-oldest VENV=.venv-oldest

# What old packages warn about is no news. Left out are the samples, which run with the packages of requirements-demo.txt.
on-oldest: $(OLDEST)
	$(RUN) -m pytest -n $(JOBS) -W ignore tests/integrations tests/django $(SAMPLES:%=--ignore-glob '*%.py') $(ARGS)

check: $(DEV) ## lint, formatting and types
	$(RUN) -m ruff check . && $(RUN) -m ruff format --check . && $(RUN) -m mypy

docs: $(DEV) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict $(ARGS)

bench: $(DEV) ## run the benchmarks
	@$(RUN) -m benchmarks $(ARGS)

torture: $(DEV) ## torment workers and their store for minutes, and prove from the log that all held
	@$(RUN) -m torture $(or $(STORE),sqlite) $(ARGS)

clean: ## remove environments, caches and what was built
	rm -rf .venv .venv-* site .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An interpreter counts when it runs: a version manager may put a name on PATH that only prints an error.
test-3.%:
	@for python in python3.$* "$$HOME"/.pyenv/versions/3.$*.*/bin/python; do \
	  "$$python" -c "import sys; sys.exit(sys.version_info[:2] != (3, $*))" 2>/dev/null && exec $(MAKE) --no-print-directory test VENV=.venv-3.$* PYTHON="$$python"; \
	done; echo "Python 3.$*: NOT TESTED, no such interpreter on PATH or under ~/.pyenv/versions"

$(MADE):
	@$(PYTHON) -c "" || { echo "No Python at '$(PYTHON)'. Name one that is 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c "import ensurepip, venv" || { echo "$(PYTHON) has no venv module. Install it (Debian and Ubuntu: apt install python3-venv) and run make again." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(DEMO): $(LISTS) requirements-demo.txt | $(MADE)
	@echo "Installing what the demo needs into $(VENV), half a minute the first time ..."
	@$(PIP) -e core -e integrations/starlette -e integrations/fastapi -e integrations/django -r requirements-demo.txt
	@touch $@

# The development environment contains the demo's.
$(DEV): $(LISTS) requirements-demo.txt requirements-dev.txt | $(MADE)
	@echo "Installing the development environment into $(VENV), a minute the first time ..."
	@$(PIP) -e core -e integrations/starlette -e integrations/fastapi -e integrations/django -r requirements-dev.txt
	@touch $(DEMO) $@

$(NEWEST): $(LISTS) | $(MADE)
	@echo "Installing the newest Django into $(VENV), half a minute the first time ..."
	@$(PIP) -e 'core[redis,postgres]' -e integrations/django $(FOR_DJANGO) gunicorn uvicorn
	@touch $@

$(OLDEST): $(LISTS) constraints-oldest.txt | $(MADE)
	@echo "Installing the oldest frameworks into $(VENV), half a minute the first time ..."
	@$(PIP:constraints.txt=constraints-oldest.txt) -e 'core[redis,postgres]' -e integrations/starlette -e integrations/fastapi \
	  -e integrations/django $(FOR_DJANGO) gunicorn httpx python-multipart uvicorn uvicorn-worker websockets wsproto
	@touch $@
