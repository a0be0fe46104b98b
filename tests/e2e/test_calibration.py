# SPDX-License-Identifier: Apache-2.0
"""Calibrated values in the real engine, on small models with random weights."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.calibrate.models import calibrate_random
from tests.e2e.harness import Engine, Score
from tests.random_models import SHAPE, save_random_model

# Several engines, or long prompts, on a slow and busy machine.
pytestmark = pytest.mark.timeout(1500)

PROMPT = [(7 * i * i + i) % SHAPE["vocab_size"] for i in range(300)]


@contextmanager
def engine(model: Path, kv_cache_dtype: str, **more: Any) -> Iterator[Engine]:
    options = {"skip_tokenizer_init": True, "dtype": "float32", "block_size": 32}
    with Engine(model, kv_cache_dtype, **options | more) as served:
        yield served


def score(model: Path, kv_cache_dtype: str, calibration: str, **more: Any) -> Score:
    options = {"polykv": {"calibration": calibration}}
    with engine(model, kv_cache_dtype, additional_config=options, **more) as served:
        found = served.llm.collective_rpc("polykv_calibrations")
        assert all(bool(each) == (calibration != "none") for each in found)
        return served.score(PROMPT)


def distance(one: Score, other: Score) -> float:
    return sum(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


@pytest.mark.parametrize("kv_cache_dtype", ["polykv_k8v8", "polykv_k4v4"])
def test_a_transform_changes_no_product(kv_cache_dtype: str, tmp_path: Path) -> None:
    """Biases, groups of two, keys as they are and centred ones that are transformed.

    A calibrated cache is no further from the exact one than the plain cache, but for
    the rounding of another basis; a transform in the wrong place would be far off.
    """
    model = save_random_model(tmp_path / "model", "qwen2")
    calibrate_random(model, tmp_path / "model" / "polykv")
    path = tmp_path / "model"
    with engine(path, "auto") as stock:
        exact = stock.score(PROMPT)
    plain = score(path, kv_cache_dtype, "none")
    calibrated = score(path, kv_cache_dtype, "auto")
    assert calibrated.logprobs != plain.logprobs
    assert distance(calibrated, exact) < 1.5 * distance(plain, exact)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_every_rank_folds_its_heads(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with a KV head each, and two that have the same one."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two workers need two CPUs")
    model = save_random_model(tmp_path / "model", family)
    calibrate_random(model, tmp_path / "calibration")
    folder = str(tmp_path / "calibration")
    one = score(tmp_path / "model", "polykv_k8v8", folder)
    first, second = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    both = score(tmp_path / "model", "polykv_k8v8", folder, tensor_parallel_size=2)
    # fp32 sums in another order may move a code by one.
    assert both.max_difference(one) < 0.02
