# SPDX-License-Identifier: Apache-2.0
"""What a run folder keeps, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.evaluate.results import RunStore


def settings(**suite: Any) -> dict[str, Any]:
    return {"model": "m", "suites": {"perplexity": {"chunk_tokens": 8, **suite}}}


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    store = RunStore(tmp_path / "run")
    store.open(settings())
    return store


def test_records_and_items_survive(store: RunStore) -> None:
    store.save("bf16", "perplexity", {"arm": "bf16", "suite": "perplexity"})
    store.items("bf16", "perplexity").add("c0", {"nll": [1.0]})
    again = RunStore(store.path)
    again.open(settings())
    assert again.record("bf16", "perplexity") is not None
    assert again.record("polykv", "perplexity") is None
    assert again.items("bf16", "perplexity").done == {"c0": {"nll": [1.0]}}
    assert list(again.records()["perplexity"]) == ["bf16"]


def test_an_item_cut_off_half_way_is_dropped(store: RunStore) -> None:
    items = store.items("bf16", "perplexity")
    items.add("c0", 1)
    with items.path.open("a") as file:
        file.write('["c1", {"nll": [1.')
    again = store.items("bf16", "perplexity")
    assert again.done == {"c0": 1}
    again.add("c1", 2)
    assert store.items("bf16", "perplexity").done == {"c0": 1, "c1": 2}


def test_other_settings_are_named(store: RunStore) -> None:
    with pytest.raises(EvalError, match=r"chunk_tokens was 8, is 16.*--fresh"):
        store.open(settings(chunk_tokens=16))
    with pytest.raises(EvalError, match="model was 'm', is 'n'"):
        store.open({**settings(), "model": "n"})


def test_a_suite_can_be_added_later(store: RunStore) -> None:
    store.open({"model": "m", "suites": {"needles": {"file": "x"}}})
    assert set(store.settings()["suites"]) == {"perplexity", "needles"}
    with pytest.raises(EvalError, match="perplexity chunk_tokens"):
        store.open(settings(chunk_tokens=16))


def test_fresh_deletes(store: RunStore) -> None:
    store.save("bf16", "perplexity", {"arm": "bf16", "suite": "perplexity"})
    store.items("bf16", "perplexity").add("c0", 1)
    store.open(settings(chunk_tokens=16), fresh=True)
    assert store.record("bf16", "perplexity") is None
    assert store.items("bf16", "perplexity").done == {}
