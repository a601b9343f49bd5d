.DEFAULT_GOAL := help
BENCH_PERF := smollm2-135m --method ar,eagle3.1:budget=3,num_steps=3,pr:budget=3,num_steps=3 --peers installed \
	--tasks gsm8k,mt_bench,humaneval --limit 10 --max-new-tokens 96 --out runs/perf/bench

.PHONY: help setup demo test test-slow check bench bench-perf docs clients ray sglang

BIN := .venv/bin
BENCH := smollm2-135m --method ar,eagle3.1,pr --tasks gsm8k,mt_bench,humaneval --limit 3 --max-new-tokens 64

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 14

setup: ## create .venv and install everything (at once if nothing changed)
	@scripts/setup.sh

demo: setup ## decode three prompts plainly, with EAGLE-3.1 and with PR, side by side
	@$(BIN)/secondguess demo

test: setup ## run the tests, the slow ones left out
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto -m "not slow"

test-slow: setup ## the slow tests, on the default target
	$(BIN)/python -m pytest -q -m slow

check: setup ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

bench: setup ## a small benchmark (SECONDGUESS_DATA names its data); another: make bench BENCH="TARGET --tasks FILE"
	$(BIN)/secondguess bench $(BENCH)

bench-perf: setup ## what cycles cost beside their products, then speed beside other engines (half an hour; nothing else may run)
	$(BIN)/python scripts/perf.py runs/perf
	$(BIN)/secondguess bench $(BENCH_PERF)

docs: setup ## build the documentation site in build/site
	@$(BIN)/python -c "import material" 2>/dev/null || $(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build

clients: setup ## other people's clients against our server, in environments of their own (CLIENTS="--quick lm-eval soak")
	$(BIN)/python scripts/clients.py $(CLIENTS)

ray: ## Ray's own slow tests (replicas, workers), in an environment with Ray (build/ray-venv)
	@scripts/setup.sh build/ray-venv dev,plots,serve,ray
	build/ray-venv/bin/python -m pytest -q -rs -m slow tests/test_ray_serve.py tests/test_ray_capture.py

sglang: setup ## SGLang's released wheel (read, not installed) against what our plug-in needs of it
	@ls build/sglang/*.whl >/dev/null 2>&1 || $(BIN)/python -m pip download -q --no-deps --only-binary :all: -d build/sglang \
		sglang==$$($(BIN)/python -c "from secondguess.integrations.sglang.hooks import RELEASE; print(RELEASE)")
	$(BIN)/python -m pytest -q -rs tests/test_sglang_hooks.py
