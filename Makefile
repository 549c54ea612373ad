# `make help` lists the targets. Every target installs the packages that it needs first, if they are missing or outdated.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
BIN := $(CURDIR)/$(VENV)/bin
SCRIPT := attnmix/page/src
SCRIPTS := $(SCRIPT) attnmix/serve.js tests/page
PIP := "$(BIN)/python" -m pip --disable-pip-version-check
# On a terminal pip shows what it downloads, which can be gigabytes, elsewhere nothing. Its warnings, such as those of a
# mirror that lacks a package, are shown where it fails. It compiles all modules: where PYTHONDONTWRITEBYTECODE is set, as
# in many containers, each process would otherwise compile them again.
pip = $(PIP) $(shell test -t 2 || echo --quiet) $(1) 2>$(VENV)/pip.log || { cat $(VENV)/pip.log >&2; exit 1; }
install = $(call pip,install --require-hashes --no-deps --requirement $(1))
IN_VENV := PATH="$(BIN):$$PATH" VIRTUAL_ENV="$(CURDIR)/$(VENV)"

MKDOCS := NO_MKDOCS_2_WARNING=1 PYTHONPATH="$(CURDIR)" mkdocs build --strict

.DEFAULT_GOAL := help
.PHONY: help install repro explore experiments test check format bundle docs verify accept lock release

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 12

install: $(INSTALLED) ## Create .venv and install the locked packages of the pipeline

# Only files that the locks name by hash are installed. torch comes first: if pip knows an index with a build for CPUs, that
# build must be selected by version, because pip with hashes prefers the package index. requirements-cuda.lock is for the
# build of torch for GPUs: without its packages `pip check` fails. The path file lets scripts and notebooks in other folders
# import the project.
$(INSTALLED): requirements.lock requirements-torch.lock requirements-cuda.lock
	@test ! -L $(VENV) || { echo "error: $(VENV) is a link, and installing would empty the folder behind it: remove the" \
	   "link, or activate that environment and run 'dvc repro' yourself" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv --clear $(VENV)
	@$(call pip,download --no-deps --dest $(VENV)/torch $$(grep -o '^torch==[0-9.]*' requirements-torch.lock))
	@$(call install,requirements-torch.lock --no-index --find-links $(VENV)/torch)
	@rm -r $(VENV)/torch
	@$(call install,requirements.lock)
	@$(PIP) check >/dev/null 2>&1 || { $(call install,requirements-cuda.lock); }
	@$(call pip,check)
	@"$(BIN)/python" -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "attnmix.pth").write_text(str(pathlib.Path.cwd()))'
	@touch $@

# What only tests and checks need. Results do not depend on it.
$(INSTALLED_DEV): $(INSTALLED) requirements-dev.lock
	@$(call install,requirements-dev.lock)
	@$(call pip,check)
	@touch $@

repro: $(INSTALLED) ## Run the pipeline; only what changed runs again
	@git rev-parse --git-dir >/dev/null 2>&1 || grep -qs "no_scm = true" .dvc/config || { \
	   echo "error: $(CURDIR) is not a git repository; run 'git init && git add -A && git commit -m start'," \
	   "or, without experiments, 'dvc config core.no_scm true'" >&2; exit 1; }
	@$(IN_VENV) dvc repro

explore: $(INSTALLED) ## Serve a page with an input on this machine: type a text, see it measured (MODEL=name, PORT=number)
	@$(IN_VENV) python -m attnmix serve $(if $(MODEL),--model "$(MODEL)") $(if $(PORT),--port $(PORT))

experiments: $(INSTALLED) ## Experiments side by side (NAMES="a b"), or five seeds of a data set (DATASET=folder SEEDS="0 1", hours)
	@$(IN_VENV) python -m experiments $(if $(DATASET),run --dataset "$(DATASET)" $(if $(SEEDS),--seeds "$(SEEDS)"),table $(NAMES))

# Bytecode is kept even where the environment forbids it: each worker would compile all tests again, for five seconds. A
# file is one worker's, so that fixtures of a module are built once, but in the long tier, where one file takes most of it.
test: $(INSTALLED_DEV) ## Run the tests (MARKED="families or long": those that take longer; MARKED=notebooks; MARKED=all: all)
	@$(IN_VENV) PYTHONDONTWRITEBYTECODE= python -m pytest --numprocesses auto --maxprocesses 4 --dist $(if $(MARKED),worksteal,loadfile) $(if $(MARKED),-m "$(filter-out all,$(MARKED))")

check: $(INSTALLED_DEV) ## Lint, format check, types, dependencies, workflows, the site's links
	@$(IN_VENV) ruff check .
	@$(IN_VENV) ruff format --check .
	@$(IN_VENV) mypy
	@$(IN_VENV) oxlint --deny-warnings $(SCRIPTS)
	@$(IN_VENV) oxfmt --check $(SCRIPTS)
	@if command -v npm >/dev/null; then npm ci --silent --ignore-scripts && npm run --silent check; \
	   else echo "npm is not installed: the types of the page's script and its bundle are not checked"; fi
	@$(IN_VENV) pip check
	@$(IN_VENV) deptry . tests
	@$(IN_VENV) check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(IN_VENV) check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
	@$(IN_VENV) zizmor --offline --quiet --pedantic .github
	@$(IN_VENV) $(MKDOCS)

format: $(INSTALLED_DEV) ## Format the code
	@$(IN_VENV) ruff check --fix .
	@$(IN_VENV) ruff format .
	@$(IN_VENV) oxfmt $(SCRIPTS)

bundle: $(INSTALLED) ## Build the page's script from its TypeScript, which needs Node
	@$(IN_VENV) python -m attnmix.page.shape > $(SCRIPT)/payload.d.ts
	@$(IN_VENV) oxfmt $(SCRIPT)
	@npm ci --silent --ignore-scripts && npm run --silent build

docs: $(INSTALLED_DEV) ## Update the tables and numbers in the documents from the code and the results, and build the site in site/
	@$(IN_VENV) python -m docs.tables
	@$(IN_VENV) $(MKDOCS)

verify: $(INSTALLED) ## Run the pipeline in three clones with other surroundings, compare every byte (PROFILE=profiles/tiny.txt, or profiles/emulated.txt and CPUS="Haswell EPYC-Milan")
	@$(IN_VENV) python -m tools.verify $(if $(PROFILE),--profile $(PROFILE)) $(if $(CPUS),--cpus $(CPUS))

accept: $(INSTALLED) ## Keep the results where a change of the code leaves those of profiles/tiny.txt as they are (dvc commit)
	@$(IN_VENV) python -m tools.accept

lock: ## Resolve pyproject.toml into the lock files, keeping versions that fit (`.ci/lock --upgrade`: the newest)
	@PYTHON="$(PYTHON)" .ci/lock

release: $(INSTALLED_DEV) ## Build the archives of a release in dist/, install the wheel with each extra and try it
	@$(IN_VENV) .ci/release
