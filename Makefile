# `make demo` and `make test` set everything up by themselves in .venv.
PYTHON ?=                 # the interpreter for .venv; empty: the first Python >= 3.11 on the path
VENV ?= .venv
REFERENCE_DATA ?=         # folder with the published data that some tests compare with
PYTEST_WORKERS ?= 2       # test processes (pytest-xdist); 0: in one
PYTEST_FLAGS ?=           # more options for pytest

PYTHON := $(strip $(PYTHON))
VENV := $(strip $(VENV))
REFERENCE_DATA := $(strip $(REFERENCE_DATA))
INSTALLED := $(VENV)/.installed
PYTEST := $(VENV)/bin/python -m pytest $(if $(REFERENCE_DATA),--reference-data="$(REFERENCE_DATA)") $(PYTEST_FLAGS)

.PHONY: demo test check bench soak gpu

demo: $(INSTALLED)
	$(VENV)/bin/runflat demo --run runs/demo

test: $(INSTALLED)
	$(PYTEST) -n $(strip $(PYTEST_WORKERS)) --dist loadgroup

check: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Each benchmark is a folder with a run.py. Here all run in small sizes; `python benchmarks/NAME/run.py` measures in full
# and writes the result that is kept beside it.
bench: $(INSTALLED)
	@set -e; found=; for script in benchmarks/*/run.py; do \
	  [ -f "$$script" ] || continue; found=yes; echo "$$script"; $(VENV)/bin/python "$$script" --quick --out "runs/bench/$$(basename "$$(dirname "$$script")")"; \
	done; [ -n "$$found" ] || echo "there is no benchmark yet"

soak: $(INSTALLED)
	$(PYTEST) -m soak --timeout=0

gpu: $(INSTALLED)
	$(VENV)/bin/python benchmarks/gpu/check.py

$(INSTALLED): pyproject.toml constraints.txt
	@set -e; python="$(PYTHON)"; \
	for candidate in python3 python3.13 python3.12 python3.11; do \
	  [ -z "$$python" ] || break; \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; fi; \
	done; \
	[ -n "$$python" ] || { echo "runflat needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }; \
	echo "installing into $(VENV) (once; a few minutes)"; \
	"$$python" -m venv $(VENV); \
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
