# SPDX-License-Identifier: Apache-2.0
"""From scores of tokens to the figures of an arm; the text that is scored."""

import math
from pathlib import Path

import numpy as np
import pytest

from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.evaluate.options import SuiteOptions
from polykv_vllm.evaluate.perplexity import PerplexitySuite, default_text, figures
from polykv_vllm.evaluate.results import ItemLog
from tests.evaluate.records import item
from tests.evaluate.test_text import Words

KEYS = ["c0", "c1", "c2", "c3", "c4"]


def log(tmp_path: Path, name: str, cost: float, is_reference: bool = False) -> ItemLog:
    items = ItemLog(tmp_path / name)
    for index, key in enumerate(KEYS):
        items.add(key, item(index, cost, is_reference))
    return items


def test_the_reference_has_a_perplexity(tmp_path: Path) -> None:
    items = log(tmp_path, "bf16", 0.0, is_reference=True)
    found = figures(KEYS, items, None)
    nll = np.concatenate([items.done[key]["nll"] for key in KEYS])
    assert found["ppl"]["value"] == pytest.approx(math.exp(nll.mean()))
    assert found["ppl"]["low"] < found["ppl"]["value"] < found["ppl"]["high"]
    assert (found["chunks"], found["tokens"]) == (5, 160)
    assert "ppl_change" not in found


def test_a_difference_is_taken_chunk_by_chunk(tmp_path: Path) -> None:
    """Chunks differ by 0.8 nats, arms by 0.02 each: the interval is of the latter."""
    reference = log(tmp_path, "bf16", 0.0, is_reference=True)
    arm = log(tmp_path, "polykv", 0.02)
    found = figures(KEYS, arm, reference)
    for end in ("value", "low", "high"):
        assert found["ppl_change"][end] == pytest.approx(math.expm1(0.02), abs=1e-6)
    spread = found["ppl"]["high"] / found["ppl"]["low"]
    assert spread > 1.1, "the perplexity itself is uncertain"
    kld = np.concatenate([arm.done[key]["kld"] for key in KEYS])
    assert found["kld"]["value"] == pytest.approx(kld.mean())
    assert found["kld_p99"] == pytest.approx(np.quantile(kld, 0.99))
    assert found["top1"]["value"] == pytest.approx(31 / 32)


def test_one_chunk_has_no_interval(tmp_path: Path) -> None:
    items = log(tmp_path, "bf16", 0.0, is_reference=True)
    found = figures(KEYS[:1], items, None)
    assert found["ppl"]["low"] is None and found["ppl"]["high"] is None


def test_the_default_text_is_wikitext_if_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYKV_DATA", str(tmp_path))
    assert default_text().name == "handbook.md"
    (tmp_path / "wikitext2_test_raw.txt").write_text("some text")
    assert default_text() == tmp_path / "wikitext2_test_raw.txt"
    monkeypatch.delenv("POLYKV_DATA")
    assert default_text().name == "handbook.md" and default_text().exists()


def test_the_shipped_text_is_cut_into_short_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("POLYKV_DATA", raising=False)
    suite = PerplexitySuite.from_options(SuiteOptions())
    demand = suite.prepare(Words(), 8192)
    assert demand.request_tokens == 256
    settings = suite.settings()
    assert (settings["text"], settings["score_from"]) == ("handbook.md", 128)


def test_chunks_longer_than_the_context_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("word " * 100)
    options = SuiteOptions(text=path, chunk_tokens=64)
    with pytest.raises(EvalError, match="64 tokens, the model takes 32"):
        PerplexitySuite.from_options(options).prepare(Words(), 32)


def test_settings_change_with_the_text(tmp_path: Path) -> None:
    digests = set()
    for words in ("a b c d", "a b c e"):
        (tmp_path / "text.txt").write_text(words)
        options = SuiteOptions(text=tmp_path / "text.txt", chunk_tokens=4)
        suite = PerplexitySuite.from_options(options)
        suite.prepare(Words(), 32)
        digests.add(suite.settings()["text_digest"])
    assert len(digests) == 2
