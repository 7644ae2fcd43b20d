# `make demo` and `make test` need nothing but Python 3.11 and make: they create .venv themselves.
SHELL := /bin/bash
PY := .venv/bin/python
export OMP_NUM_THREADS := 1

.PHONY: env demo test test-slow fault-table lint promtool clean

env:
	@.ci/env.sh

demo: env  ## a surge on a real PD stack, stock SGLang against Basin; results in out/demo
	$(PY) benchmarks/surge_demo.py $(DEMO_ARGS)

lint: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports

promtool: env  ## puts promtool, which the tests of the alert rules run, into .venv
	@.ci/promtool.sh

test: lint promtool  ## everything CI runs
	$(PY) -m pytest -m "not slow"

test-slow: env  ## engines killed, frozen and cut off, stalled reads, tensor parallelism: a quarter of an hour
	$(PY) -m pytest -m slow

fault-table: env  ## runs the fault tests, ten minutes, and writes what they saw into the README
	$(PY) -m pytest -m fault --fault-table $(FAULT_ARGS)

clean:
	rm -rf .venv out
