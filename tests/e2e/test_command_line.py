# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command, as a user types it."""

import os
import re
import subprocess
import sys
from pathlib import Path

from polykv_vllm.formats import CACHE_DTYPES

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


def test_bench_latency(smollm2: Path) -> None:
    sizes = "--input-len 40 --output-len 4 --batch-size 2 --max-model-len 256"
    counts = "--num-iters 1 --num-iters-warmup 1 --kv-cache-memory-bytes 64M"
    options = f"{sizes} {counts} --enforce-eager --kv-cache-dtype polykv".split()
    status, output = vllm("bench", "latency", "--model", smollm2, *options)
    assert status == 0, output[-3000:]
    assert "Avg latency" in output
    assert re.search(r"kv_cache_dtype='?polykv\b", output)
