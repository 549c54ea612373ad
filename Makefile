# `make help` lists the targets. Each target first installs missing or outdated packages.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
BIN := $(CURDIR)/$(VENV)/bin
SCRIPT := attnmix/page/src
SCRIPTS := $(SCRIPT) attnmix/serve.js tests/page
PIP := "$(BIN)/python" -m pip --disable-pip-version-check
# pip shows progress on a terminal only, because downloads can be gigabytes, and warnings only after failures. It compiles
# all modules at installation: with PYTHONDONTWRITEBYTECODE, as in many containers, each process would compile them again.
pip = $(PIP) $(shell test -t 2 || echo --quiet) $(1) 2>$(VENV)/pip.log || { cat $(VENV)/pip.log >&2; exit 1; }
install = $(call pip,install --require-hashes --no-deps --requirement $(1))
IN_VENV := PATH="$(BIN):$$PATH" VIRTUAL_ENV="$(CURDIR)/$(VENV)"

MKDOCS := NO_MKDOCS_2_WARNING=1 PYTHONPATH="$(CURDIR)" mkdocs build --strict

.DEFAULT_GOAL := help
.PHONY: help install repro explore experiments test check format bundle docs verify accept lock release

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 12

install: $(INSTALLED) ## Create .venv and install the locked packages of the pipeline

# Only files with a locked hash are installed. torch comes first: a CPU build from an additional index must be selected by
# version, because pip with hashes prefers the package index. The GPU build needs requirements-cuda.lock: without it,
# `pip check` fails. The path file makes the project importable from scripts and notebooks in other folders.
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

# Packages for tests and checks. Results do not depend on them.
$(INSTALLED_DEV): $(INSTALLED) requirements-dev.lock
	@$(call install,requirements-dev.lock)
	@$(call pip,check)
	@touch $@

repro: $(INSTALLED) ## Run the pipeline; only stages with changes run again
	@git rev-parse --git-dir >/dev/null 2>&1 || grep -qs "no_scm = true" .dvc/config || { \
	   echo "error: $(CURDIR) is not a git repository; run 'git init && git add -A && git commit -m start'," \
	   "or, without experiments, 'dvc config core.no_scm true'" >&2; exit 1; }
	@$(IN_VENV) dvc repro

explore: $(INSTALLED) ## Start a local server that measures typed texts (MODEL=name, PORT=number)
	@$(IN_VENV) python -m attnmix serve $(if $(MODEL),--model "$(MODEL)") $(if $(PORT),--port $(PORT))

experiments: $(INSTALLED) ## Compare experiments (NAMES="a b"), or run five seeds on a data set (DATASET=folder SEEDS="0 1", hours)
	@$(IN_VENV) python -m experiments $(if $(DATASET),run --dataset "$(DATASET)" $(if $(SEEDS),--seeds "$(SEEDS)"),table $(NAMES))

# Bytecode is written even if the environment disables it, because each worker would compile all tests again (5 s). Each
# file runs on one worker, which builds module fixtures once; the long tier distributes tests, because one file dominates.
test: $(INSTALLED_DEV) ## Run the tests (MARKED="families or long" for slow tests; MARKED=notebooks; MARKED=all)
	@$(IN_VENV) PYTHONDONTWRITEBYTECODE= python -m pytest --numprocesses auto --maxprocesses 4 --dist $(if $(MARKED),worksteal,loadfile) $(if $(MARKED),-m "$(filter-out all,$(MARKED))")

check: $(INSTALLED_DEV) ## Check lint, format, types, dependencies, workflows and links of the site
	@$(IN_VENV) ruff check .
	@$(IN_VENV) ruff format --check .
	@$(IN_VENV) mypy
	@$(IN_VENV) oxlint --deny-warnings $(SCRIPTS)
	@$(IN_VENV) oxfmt --check $(SCRIPTS)
	@if command -v npm >/dev/null; then npm ci --silent --ignore-scripts && npm run --silent check && \
	   $(IN_VENV) python -m tools.licences | cmp - attnmix/page/licences.txt; \
	   else echo "npm is not installed: types and bundle of the page's script are not checked"; fi
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

bundle: $(INSTALLED) ## Build the page's script from TypeScript (needs Node)
	@$(IN_VENV) python -m attnmix.page.shape > $(SCRIPT)/payload.d.ts
	@$(IN_VENV) oxfmt $(SCRIPT)
	@npm ci --silent --ignore-scripts && npm run --silent build
	@$(IN_VENV) python -m tools.licences > attnmix/page/licences.txt

docs: $(INSTALLED_DEV) ## Regenerate tables and numbers in the documents, and build the site in site/
	@$(IN_VENV) python -m docs.tables
	@$(IN_VENV) $(MKDOCS)

verify: $(INSTALLED) ## Run the pipeline in three clones with different environments and compare all bytes (PROFILE=profiles/tiny.txt, or profiles/emulated.txt and CPUS="Haswell EPYC-Milan")
	@$(IN_VENV) python -m tools.verify $(if $(PROFILE),--profile $(PROFILE)) $(if $(CPUS),--cpus $(CPUS))

accept: $(INSTALLED) ## Keep the results (dvc commit) if a code change does not affect those of profiles/tiny.txt
	@$(IN_VENV) python -m tools.accept

lock: ## Update the lock files from pyproject.toml, with unchanged versions if possible (`.ci/lock --upgrade`: newest)
	@PYTHON="$(PYTHON)" .ci/lock

release: $(INSTALLED_DEV) ## Build the distribution in dist/, and test the wheel with each extra
	@$(IN_VENV) .ci/release
