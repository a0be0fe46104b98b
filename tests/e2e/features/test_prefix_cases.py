# SPDX-License-Identifier: Apache-2.0
"""Case 19: many short questions over one long prefix, in batches of all sizes."""

from typing import Any

import pytest

from tests.e2e.features.models import save_llama
from tests.e2e.scheduling import run_cases

PREFIX = [(7 * i * i + i) % 257 for i in range(2000)]  # 15 tiles of 128, and 80 tokens
BATCHES = (1, 2, 7, 8)
EVERY = 6  # steps between two batches: some still decode when the next one comes
OPTIONS = {
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 2304,
    "max_num_seqs": 20,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 64 << 20,
}


def questions() -> list[dict[str, Any]]:
    found = []
    for number, size in enumerate(BATCHES):
        for _ in range(size):
            index = len(found)
            own = [(11 * index + i) % 257 for i in range(3 + 5 * index)]
            # The first one computes the prefix, in eight steps.
            arrival = 0 if number == 0 else 4 + EVERY * number
            found.append(
                {
                    "prompt": PREFIX + own,
                    "arrival": arrival,
                    "sampling": {"max_tokens": 12 + index % 5},
                }
            )
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = tmp_path_factory.mktemp("llama")
    save_llama(model, max_position_embeddings=4096)
    case = {"requests": questions(), "num_tokens": 99}
    cases = {str(share): case | {"share": share} for share in (True, False)}
    alone = [request | {"arrival": 0} for request in questions()]
    cases["alone"] = {"requests": alone[-1:], "num_tokens": 99, "share": True}
    return run_cases(model, OPTIONS, cases)


def test_18_questions_over_one_prefix(results: dict[str, Any]) -> None:
    """Not a bit depends on whether blocks are read for several requests at once."""
    shared, unshared = results["True"], results["False"]
    assert len(shared["tokens"]) == sum(BATCHES) == 18
    assert shared["tokens"] == unshared["tokens"]
    assert shared["logprobs"] == unshared["logprobs"]
    assert shared["mixed_steps"] > 0
    assert shared["attention"]["max_readers"] >= max(BATCHES)
    assert unshared["attention"]["max_readers"] == 0


def test_a_question_alone_has_the_same_answer(results: dict[str, Any]) -> None:
    (alone,), last = results["alone"]["logprobs"].values(), str(sum(BATCHES) - 1)
    # Matrix products of another number of rows: see test_features.py.
    assert results["True"]["logprobs"][last] == pytest.approx(alone, abs=0.02)
