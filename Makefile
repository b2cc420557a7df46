# Everything is run through these targets; .ci/run calls the same ones.
#
#   PYTHON       the interpreter that makes .venv (default: python3, at least 3.11)
#   TORCH_INDEX  where the CPU build of PyTorch is found when the default index has only the CUDA one
#   CASES        which cases of slow tests run: two of each, drawn by the commit; empty for all
#   TORCH        what is installed as torch; `make install TORCH=torch` overrides the choice of build

PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH ?=
WORKERS ?= 2
CASES ?= --draw $$(git rev-parse HEAD 2>/dev/null || echo 0)

BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
OLDEST := .venv-oldest

.DEFAULT_GOAL := help
.PHONY: help install demo dashboard ready-made zoo-figures screenshots gate test test-quarter test-all test-gpu test-nojit test-oldest dist lint clean \
	bench mutants sweep notebooks figures bench-fidelity bench-search bench-explore

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

install: $(STAMP) ## make .venv and install the package with all extras

$(STAMP): pyproject.toml constraints.txt .ci/install-torch.py
	@.ci/make-venv "$(PYTHON)"
	$(BIN)/python .ci/install-torch.py --index "$(TORCH_INDEX)" --requirement "$(TORCH)"
	$(PIP) install --constraint constraints.txt --editable ".[all,test]"
	@# One small exploration calls every kernel of search and simulation, which numba compiles and keeps beside the sources.
	@kept=$$(mktemp -d) && TENSOROPT_CACHE=$$kept $(BIN)/tensoropt explore zoo:gpt2-tiny --cluster 'dgx-h100[2]' \
		--micro-batches 1,2 --pipelines always --out $$kept/out >/dev/null && rm -rf $$kept
	@touch $@

demo: $(STAMP) ## the whole loop on a GPT-2-style model: frontier, plan, run, compare
	$(BIN)/tensoropt explore zoo:gpt2-demo --cluster cpu:2 --out out/demo
	$(BIN)/tensoropt choose out/demo --knee --why --out out/demo/plan.json
	$(BIN)/tensoropt verify out/demo/plan.json --save out/demo
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m tensoropt.execute out/demo/plan.json --steps 4

dashboard: $(STAMP) ## the web page: frontiers, plans, exports (DIR=... opens your explorations)
	$(BIN)/python -m tensoropt dashboard $(DIR)

ready-made: $(STAMP) ## make the explorations that ship with the dashboard again
	$(BIN)/python -m tests.docs.ready_made

bench: $(STAMP) ## all benchmarks into tests/benchmarks/results, on an idle machine (ARGS=--quick for a taste)
	$(BIN)/python -m tests.benchmarks $(ARGS)

mutants: $(STAMP) ## change the source in one place at a time: does a test notice? Hours (ARGS="--resume", --quick)
	nice $(BIN)/python -m tests.mutants --workers $(WORKERS) $(ARGS)

sweep: $(STAMP) ## the samples of PyTorch's own operators, split in every way: hours, goes on where it stopped (ARGS=--write)
	nice $(BIN)/python -W ignore -m tests.sweep $(ARGS)

notebooks: $(STAMP) ## run the notebooks and keep what they print
	$(BIN)/python -m tests.notebooks.execute $(ARGS)

figures: $(STAMP) ## write the tables of results in the READMEs anew, from the newest ones
	$(BIN)/python -m tests.docs.figures

bench-fidelity: $(STAMP) ## predicted against executed on two CPU ranks (ARGS=--quick for a taste)
	$(BIN)/python -m tests.benchmarks.fidelity.bench_fidelity $(ARGS)

zoo-figures: $(STAMP) ## count what `tensoropt list models` shows again (NAMES="gpt2 vgg16" for some)
	$(BIN)/python -m tests.zoo.statistics $(NAMES)

screenshots: $(STAMP) ## pictures of every page for the README (needs Chromium)
	$(BIN)/python -m tests.docs.screenshots

bench-search: $(STAMP) ## the search against published methods, about 10 minutes (ARGS=--quick for a taste)
	$(BIN)/python -m tests.benchmarks.search.bench_search $(ARGS)

bench-explore: $(STAMP) ## seconds of explore: cold, again, with other links (ARGS="--quick gpt2" for a taste)
	$(BIN)/python -m tests.benchmarks.explore.bench_explore $(ARGS)

gate: $(STAMP) ## answer thirty fixed questions: what moved? (ARGS=--keep accepts today's answers)
	$(BIN)/python -m tests.gate $(ARGS)

test: $(STAMP) ## the test suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(ARGS)

test-quarter: $(STAMP) ## a quarter of the slow tests, drawn like that (QUARTER=0 to 3)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow --quarter $(QUARTER) $(CASES) $(ARGS)

test-all: $(STAMP) ## the test suite with its slow part, two cases of each slow test (CASES= for all)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --hypothesis-profile thorough $(CASES) $(ARGS)

test-gpu: $(STAMP) ## what only a GPU can show
	$(BIN)/python -m pytest -n 0 -m gpu tests/gpu $(ARGS)

test-nojit: $(STAMP) ## the search without compiled kernels, as plain Python
	NUMBA_DISABLE_JIT=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/frontier tests/search $(ARGS)

test-oldest: $(STAMP) ## the test suite with the oldest supported versions of everything, in .venv-oldest
	"$(PYTHON)" -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python .ci/oldest.py > $(OLDEST)/oldest.txt
	$(OLDEST)/bin/python .ci/install-torch.py --index "$(TORCH_INDEX)" --requirement "$(TORCH)"
	$(OLDEST)/bin/python -m pip install --constraint $(OLDEST)/oldest.txt --editable ".[all,test]"
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(ARGS)

dist: $(STAMP) ## wheel and source distribution, in dist/
	$(BIN)/python -m build

lint: $(STAMP) ## style, types, direction of imports, weight
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.weight

clean: ## remove what was built, .venv included
	rm -rf .venv $(OLDEST) build dist out *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find tensoropt app tests notebooks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
