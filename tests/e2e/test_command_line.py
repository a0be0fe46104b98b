# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command, as a user types it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polykv_vllm.formats import CACHE_DTYPES
from tests.e2e.test_families import FAMILIES, save_model

VLLM = Path(sys.executable).with_name("vllm")


def vllm(*arguments: str | Path, timeout_s: float = 300) -> tuple[int, str]:
    """Run a vllm command; returns its exit status and all its output."""
    done = subprocess.run(
        [str(VLLM), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "INFO", "COLUMNS": "200"},
        check=False,
    )
    return done.returncode, done.stdout


def test_help_lists_our_dtypes() -> None:
    status, output = vllm("serve", "--help=kv-cache-dtype")
    assert status == 0
    for name in CACHE_DTYPES:
        assert name in output


def test_unknown_dtype() -> None:
    status, output = vllm("serve", "no-model", "--kv-cache-dtype", "polykv_k1v1")
    assert status != 0
    assert "polykv_k1v1" in output and "polykv_k7v4" in output


def test_refusal_is_the_last_word(smollm2: Path) -> None:
    options = ("--kv-cache-dtype", "polykv", "--block-size", "16")
    status, output = vllm("serve", smollm2, *options)
    assert status != 0
    assert output.rstrip().endswith("--block-size 16: multiples of 32 are possible")
    assert "Loading" not in output


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_bench(command: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, *FAMILIES["qwen3-128"])
    sizes = ["--input-len", "40", "--output-len", "4", "--max-model-len", "256"]
    if command == "latency":
        sizes += ["--num-iters", "1", "--num-iters-warmup", "1", "--batch-size", "2"]
    else:
        sizes += ["--num-prompts", "2", "--dataset-name", "random"]
    options = ["--skip-tokenizer-init", "--enforce-eager", *sizes]
    options += ["--kv-cache-memory-bytes", "16M", "--kv-cache-dtype", "polykv"]
    status, output = vllm("bench", command, "--model", model, *options)
    assert status == 0, output[-3000:]
    assert "polykv" in output
