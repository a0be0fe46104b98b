# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. All of them set up $(VENV) first if needed.
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.polykv-installed
# What the editable installation is built from: a change runs set-up again.
BUILD_INPUTS := pyproject.toml setup.py packaging/install.sh \
    $(shell find polykv_vllm/csrc packaging/vllm-cpu-shim -name '*.cpp' -o -name '*.h' \
        -o -name '*.toml')
PYTEST_ARGS ?=
# Tests of one file share engines and stay together.
TEST_WORKERS ?= 2
# Where `make test-cuda-wheel` installs.
CUDA_VENV ?= .venv-cuda

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench patches test-next-vllm test-triton-compile \
    test-cuda-wheel crash clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | \
	    awk -F ':.*## ' '{printf "  make %-19s %s\n", $$1, $$2}'

$(STAMP): $(BUILD_INPUTS)
	@packaging/install.sh $(VENV)
	@touch $@

setup: $(STAMP)  ## virtual environment with vLLM for CPU and polykv-vllm
	@echo 'set up; next: make demo, or source $(BIN)/activate'

demo: $(STAMP)  ## serve a small model with a compressed cache to 8 agents
	@$(BIN)/polykv demo

test: lint  ## lint, types and all tests, the real engine included
	$(BIN)/pytest --numprocesses $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

test-triton-compile: $(STAMP)  ## compile every configuration of the GPU kernels (hours)
	$(BIN)/python -W ignore -m benchmarks.gpu_compile --all

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## rewrite Python and C++ sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find polykv_vllm/csrc -name '*.cpp' -o -name '*.h' | xargs -r $(BIN)/clang-format -i

bench: $(STAMP)  ## speed and memory beside vLLM's own cache
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.store
	$(BIN)/python -m benchmarks.engine
	$(BIN)/polykv bench agents --quick

patches: $(STAMP)  ## the seams as source patches, for your own build of vLLM
	$(BIN)/python -m polykv_vllm.seams --write-patches patches/vllm-0.32.0

test-next-vllm: $(STAMP)  ## which seams fit the newest vLLM that pip can get
	$(BIN)/python packaging/try_next_vllm.py

crash: $(STAMP)  ## kill writers of the pool with -9, fifty times
	POLYKV_CRASH_ROUNDS=50 $(BIN)/pytest -s tests/pool/disk/test_crash.py

test-cuda-wheel:  ## the plugin in the real vLLM for CUDA, without a GPU (installs 9 GB)
	packaging/cuda_wheel.sh $(CUDA_VENV)

clean:  ## remove build products and caches; keeps $(VENV)
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f polykv_vllm/_C*.so $(STAMP)
	find polykv_vllm tests benchmarks -name __pycache__ -prune -exec rm -rf {} + \
	    2>/dev/null || true
