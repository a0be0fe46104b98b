# SPDX-License-Identifier: Apache-2.0
"""Reading shared blocks once changes no token and no bit of a log-probability.

The same requests in the same steps, once with the option `prefix_sharing` and once
without. The counters say that the first engine did read blocks for several requests
and the second did not, and that it could have: the same pairs of tokens.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import TEXT
from tests.e2e.harness import fast_dtype
from tests.e2e.scheduling import run_cases
from tests.random_models import VOCABULARY, save_model

Request = dict[str, Any]
Result = dict[str, Any]

OPTIONS = {
    "block_size": 32,
    "max_model_len": 1280,
    "max_num_seqs": 16,
    # Smaller than the prompts: while one is computed, others decode.
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 128 << 20,
}
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def request(prompt: list[int], max_tokens: int, arrival: int = 0) -> Request:
    assert len(prompt) + max_tokens <= OPTIONS["max_model_len"]
    sampling = {"max_tokens": max_tokens}
    return {"prompt": prompt, "arrival": arrival, "sampling": sampling}


def crowd(text: list[int]) -> list[Request]:
    """Two groups, one of them nested, equal prompts, loners; they come and go."""
    system, other, team = text[:600], text[700:1600], text[1600:1900]
    whole = text[100:740]  # ends with a tile
    return [
        *(request(system + text[i : i + 5 + 36 * i], 30 - 9 * i) for i in range(3)),
        request(other + text[50:114], 28),
        request(other + text[60:69], 12),
        request(other + text[70:200], 22, arrival=9),
        request(system + team + text[5:17], 18),
        request(system + team + text[40:43], 26, arrival=5),
        request(whole, 20),
        request(whole, 14, arrival=3),
        request(text[1900:1950], 9),
        request(text[1300:1700], 17, arrival=2),
        # Repeats itself, so that drafts are proposed and verified.
        request(system + text[700:740] * 3, 24),
        request(text[2000:2007] * 20, 24, arrival=1),
    ]


def run(model: Path, requests: list[Request], share: bool, **options: Any) -> Result:
    settings = {"additional_config": {"polykv": {"prefix_sharing": share}}}
    case = {"requests": requests, "num_tokens": 99}
    return run_cases(model, OPTIONS | options | settings, {"case": case})["case"]


def check(on: Result, off: Result, requests: list[Request]) -> dict[str, float]:
    """Compare; returns the pairs of tokens that the first run attended, by kind."""
    assert on["tokens_per_step"] == off["tokens_per_step"], "not the same schedule"
    assert on["first_step"] == off["first_step"]
    lengths = [r["sampling"]["max_tokens"] for r in requests]
    assert [len(on["tokens"][str(i)]) for i in range(len(requests))] == lengths
    assert on["tokens"] == off["tokens"]
    assert on["logprobs"] == off["logprobs"]  # floats, all digits
    pairs, pairs_off = on["attention"]["pairs"], off["attention"]["pairs"]
    assert pairs["switched_off"] == pairs_off["shared"] == 0
    assert pairs["shared"] == pairs_off["switched_off"] > 0
    for kind in ("own_chunk", "no_other_reader", "cost_rule"):
        assert pairs[kind] == pairs_off[kind]
    assert off["attention"]["max_readers"] == 0
    return dict(pairs)


def test_smollm2_with_drafts(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    text = AutoTokenizer.from_pretrained(smollm2)(TEXT)["input_ids"]
    requests = crowd(text)
    options = {"speculative_config": DRAFTS, "dtype": fast_dtype()}
    on, off = (run(smollm2, requests, share, **options) for share in (True, False))
    pairs = check(on, off, requests)
    assert on["attention"]["threads"] == off["attention"]["threads"] == 2
    # The batch was what it was meant to be.
    assert on["drafts"] > 20
    assert on["mixed_steps"] > 5
    assert on["attention"]["max_prefixes"] >= 3
    assert on["attention"]["max_readers"] >= 5
    # The prompts in work, most of the pairs, fill passes alone and share nothing.
    assert pairs["shared"] > 0.1 * sum(pairs.values())


def run_both(model: Path, requests: list[Request], **options: Any) -> list[Result]:
    """Run with sharing and without, in one engine of a model with random weights."""
    settings = OPTIONS | {"skip_tokenizer_init": True, "dtype": "float32"} | options
    case = {"requests": requests, "num_tokens": 99}
    cases = {"on": case | {"share": True}, "off": case | {"share": False}}
    return list(run_cases(model, settings, cases).values())


@pytest.mark.parametrize("one_group", [False, True], ids=["groups", "one group"])
def test_gemma3_beyond_the_window(tmp_path: Path, one_group: bool) -> None:
    """Also with all layers in one KV cache group, whose window is some layers' only."""
    kinds = ["sliding_attention", "full_attention"] * 2
    changes = {
        "head_dim": 64,
        "sliding_window": 300,
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
    }
    model = save_model(tmp_path, "gemma3_text", changes)
    requests = crowd([(7 * i * i + i) % VOCABULARY for i in range(2100)])
    on, off = run_both(model, requests, disable_hybrid_kv_cache_manager=one_group)
    check(on, off, requests)
    assert on["mixed_steps"] > 5
    assert on["attention"]["max_readers"] >= 3


def test_preemption(tmp_path: Path) -> None:
    """Requests lose their blocks, which others get, and come back to other ones."""
    changes = {"hidden_size": 192, "num_attention_heads": 3}
    model = save_model(tmp_path, "llama", changes)
    text = [(7 * i * i + i) % VOCABULARY for i in range(700)]
    # 19 blocks for the prompt, and four for the rest of each; the cache has 41.
    requests = [request(text[:600] + text[i : 5 + 2 * i], 99 - i) for i in range(8)]
    on, off = run_both(model, requests, num_gpu_blocks_override=42)
    check(on, off, requests)
    assert on["preempted"] == off["preempted"] > 0
