# make quickstart | test | docs | lab | clean. Each sets up what it needs in .venv first (pip is the only thing that uses the network).
#   make quickstart ARGS="--minutes 1"     arguments for gan_quickstart
#   make test PYTHON=python3.12             another Python (3.11 or newer)
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help quickstart test docs made lab clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

help:
	@sed -n '1,3s/^# *//p' Makefile

# Installed again only when the requirements or the packaging change.
$(STAMP): settings.ini setup.py
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not on PATH. Next: install Python 3.11 or newer, or name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; v="%d.%d" % sys.version_info[:2]; sys.exit(0 if sys.version_info >= (3, 11) else f"$(PYTHON) is Python {v}; gan_course needs 3.11 or newer. Next: make PYTHON=python3.12 (or another that you have)")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment. Next: install its venv package (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

quickstart: $(STAMP)
	$(BIN)/gan_quickstart $(ARGS)

test: $(STAMP)
	$(BIN)/python tests/tools/run_all.py $(ARGS)

docs: $(STAMP)
	$(BIN)/python tests/tools/docs_site.py

# README.md, nbs/sidebar.yml and nbs/nbdev.yml from the notebooks and settings.ini; gan_course/ from the notebooks
made: $(STAMP)
	$(BIN)/nbdev_export
	$(BIN)/python tests/tools/made_files.py

lab: $(STAMP)
	$(BIN)/jupyter lab nbs $(ARGS)

# Everything that these commands write, but not your runs/
clean:
	rm -rf $(VENV) _docs _proc build dist gan_course.egg-info .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
