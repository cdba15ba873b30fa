# `make demo` and `make test` do everything on a fresh machine, and need Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
VENV_TL3 ?= .venv-tl3
TESTS ?= tests
ARGS ?=

.PHONY: demo test check test-tl3 bench clean

demo: $(VENV)/installed
	$(VENV)/bin/python scripts/reproduce.py focus-dilution $(ARGS)

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest -q -n auto $(TESTS) $(ARGS)

check: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# The same tests with the last TransformerLens that has HookedTransformer.
test-tl3: $(VENV_TL3)/installed
	$(VENV_TL3)/bin/python -m pytest -q -n auto $(TESTS) $(ARGS)

bench: $(VENV)/installed
	$(VENV)/bin/python scripts/bench.py $(ARGS)

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check -c constraints.txt -e '.[test,film,check]'
	touch $@

$(VENV_TL3)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_TL3)
	grep -v '^transformer-lens==' constraints.txt > $(VENV_TL3)/constraints.txt
	$(VENV_TL3)/bin/pip install -q --disable-pip-version-check -c $(VENV_TL3)/constraints.txt 'transformer-lens==3.9.0' -e '.[test,film]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV_TL3) dist build
