# make demo: the main job. make test: all tests that this machine can run. Both make .venv first.
# With AUTOFLASH_NO_VENV=1 they use python3 as it is (a GPU host whose packages are managed).
PYTHON ?= python3
ifdef AUTOFLASH_NO_VENV
PY := $(PYTHON)
READY :=
else
PY := .venv/bin/python
READY := .venv/.ready
endif
RUN := $(PY) -m
# Two test processes: the suite is made for two cores.
JOBS ?= 2

.PHONY: demo test test-all lint format golden clean

demo: $(READY)
	$(PY) scripts/demo.py

test: $(READY)
	$(RUN) pytest -n $(JOBS) -m "not full"

test-all: $(READY)
	$(RUN) pytest -n $(JOBS)

lint: $(READY)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(PY) -c "from importlinter.cli import lint_imports_command as main; main()"

format: $(READY)
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

golden: $(READY)
	$(PY) scripts/update_golden.py

clean:
	rm -rf .venv build dist *.egg-info

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
