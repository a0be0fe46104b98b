# SPDX-License-Identifier: Apache-2.0
"""Windows of full precision on the real engine: a small random model, every step.

Each layer's output is compared with the oracle's, which has the raw rows of every token
(`window_worker`): what a query sees in full precision is what it should see.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.calibrate.models import calibrate_random
from tests.e2e.harness import Engine
from tests.random_models import VOCABULARY, save_model, save_random_model

# Several engines, or long prompts, on a slow and busy machine.
pytestmark = pytest.mark.timeout(1500)

SINKS, RECENT = 33, 70
BLOCK = 64
CHUNK = 100
TOLERANCE = 5e-3  # of the largest output: the kernels' own is 3e-3 (tests/csrc)
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "block_size": BLOCK,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": CHUNK,
    "worker_extension_cls": "tests.e2e.window_worker.WindowExtension",
}


def start(model: Path, polykv: dict[str, Any] | None = None, **options: Any) -> Engine:
    windows = {"sink_tokens": SINKS, "recent_tokens": RECENT, "max_sequences": 4}
    return Engine(
        model,
        "polykv_k2v2",
        additional_config={"polykv": {"windows": windows} | (polykv or {})},
        **OPTIONS | {"kv_cache_memory_bytes": 4 << 20} | options,
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * i * i + (31 + seed) * i + seed) % VOCABULARY for i in range(length)]


def run(engine: Engine, prompts: list[list[int]], **sampling: Any) -> dict[str, Any]:
    """Generate; return what the worker has seen, and the hits."""
    engine.call("polykv_watch", SINKS, RECENT)
    outputs = engine.generate(prompts, **{"ignore_eos": True} | sampling)
    watched: dict[str, Any] = engine.call("polykv_watched")
    assert watched["rows"] > 0
    assert watched["error"] <= TOLERANCE < watched["compressed_error"] / 10
    return watched | {"hits": [output.num_cached_tokens for output in outputs]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2}
    return save_model(tmp_path_factory.mktemp("llama"), "llama", changes)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with start(model) as engine:
        yield engine


LENGTHS = (
    1,
    SINKS,
    SINKS + 1,
    RECENT - 1,
    RECENT + 1,
    SINKS + RECENT - 1,
    SINKS + RECENT,
    SINKS + RECENT + 1,
)


def test_short_prompts_and_what_follows(engine: Engine) -> None:
    for length in LENGTHS:
        watched = run(engine, [prompt(length, length)], max_tokens=3)
        assert watched["incomplete_rows"] == 0


def test_a_prompt_in_chunks_and_forty_tokens(engine: Engine) -> None:
    watched = run(engine, [prompt(3 * CHUNK + 17, 77)], max_tokens=40)
    assert watched["incomplete_rows"] == 0


def test_requests_side_by_side(engine: Engine) -> None:
    """More than run at once; their chunks end where the step's budget does."""
    prompts = [prompt(150 + 30 * i, 110 + i) for i in range(6)]
    watched = run(engine, prompts, max_tokens=8)
    assert watched["hits"] == [0] * 6
    assert watched["incomplete_rows"] == 0


def test_hits_find_the_raw_tail(engine: Engine) -> None:
    """Of a prompt, its own end, and an inner place that others continue from."""
    first, own = prompt(4 * BLOCK + 9, 200), [prompt(20, 300 + i) for i in range(3)]
    assert run(engine, [first])["hits"] == [0]
    again = run(engine, [first])
    inner = run(engine, [first[: 2 * BLOCK + 5] + each for each in own])
    assert again["hits"] == [4 * BLOCK]
    assert inner["hits"] == [2 * BLOCK] * 3
    assert again["incomplete_rows"] == inner["incomplete_rows"] == 0


def test_where_the_raw_tail_is_gone_tokens_are_attended_as_compressed(
    engine: Engine,
) -> None:
    first = prompt(4 * BLOCK + 9, 400)
    run(engine, [first])
    run(engine, [prompt(500, 500 + i) for i in range(4)], max_tokens=2)
    hit = run(engine, [first], max_tokens=RECENT + 10)
    assert hit["hits"] == [4 * BLOCK]
    # The first tokens' copies are gone as well, for as long as the request runs.
    assert hit["incomplete_rows"] > 0
    assert engine.counter("vllm:num_preemptions") == 0


def test_drafts_and_preemption(model: Path) -> None:
    """Rejected drafts are written again; the preempted begin anew or hit."""
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    speculation |= {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
    options = {"speculative_config": speculation, "max_model_len": 512}
    with start(model, **options, num_gpu_blocks_override=11) as engine:
        prompts = [prompt(40, 7)[:20] * 8 + prompt(40, 600 + i) for i in range(4)]
        watched = run(engine, prompts, max_tokens=90)
        assert engine.counter("vllm:num_preemptions") > 0
        assert engine.counter("vllm:spec_decode_num_draft_tokens") > 0
        assert watched["incomplete_rows"] < watched["rows"] / 10


def check_chunks_and_hits(engine: Engine) -> None:
    first = prompt(4 * BLOCK + 9, 700)
    miss = run(engine, [first], max_tokens=RECENT + 3)
    hit = run(engine, [first], max_tokens=RECENT + 3)
    assert (miss["hits"], hit["hits"]) == ([0], [4 * BLOCK])
    assert miss["incomplete_rows"] == hit["incomplete_rows"] == 0


def test_layers_with_sliding_windows(tmp_path: Path) -> None:
    """Two KV cache groups; a sliding window that the first tokens soon have left."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    changes = {"head_dim": 64, "sliding_window": 96, "layer_types": kinds}
    with start(save_model(tmp_path, "gemma3_text", changes)) as engine:
        check_chunks_and_hits(engine)


def test_keys_that_are_centred_and_transformed(tmp_path: Path) -> None:
    """Beside their transformed codes, raw keys are as the model made them."""
    model = save_random_model(tmp_path / "model", "qwen2")
    calibrate_random(model, tmp_path / "calibration")
    options = {"calibration": str(tmp_path / "calibration")}
    with start(tmp_path / "model", options) as engine:
        assert engine.call("polykv_calibrations")
        check_chunks_and_hits(engine)


def test_blocks_from_disk_have_no_raw_tail(model: Path, tmp_path: Path) -> None:
    """Also where the blocks that they once were have left pages behind."""
    first = prompt(4 * BLOCK + 9, 800)
    with start(model, {"pool": {"path": str(tmp_path)}}) as engine:
        miss = run(engine, [first], max_tokens=3)
        time.sleep(0.5)  # the writer is behind by milliseconds
        run(engine, [prompt(5, 801)])
        assert engine.llm.reset_prefix_cache()
        restored = run(engine, [first], max_tokens=RECENT + 10)
        assert engine.counter("vllm:polykv_pool_restored") == 4
    assert (miss["hits"], restored["hits"]) == ([0], [4 * BLOCK])
    assert miss["incomplete_rows"] == 0 < restored["incomplete_rows"]


def test_two_ranks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV head each; what is checked here is the first rank's."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two workers need two CPUs")
    first, second = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    with start(model, tensor_parallel_size=2) as engine:
        check_chunks_and_hits(engine)
