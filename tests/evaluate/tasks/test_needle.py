# SPDX-License-Identifier: Apache-2.0
"""Numbers hidden in text."""

import json
import random
from pathlib import Path

import pytest

from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.evaluate.options import SuiteOptions, TaskOptions
from polykv_vllm.evaluate.tasks.needle import Haystack, NeedleSuite, read_passages
from polykv_vllm.evaluate.tasks.prompts import PromptEncoder
from tests.evaluate.byte_tokenizer import byte_tokenizer

SENTENCES = [f"Sentence {n:03d} says no more." for n in range(300)]  # 26 bytes each


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(
        "\n\n".join(" ".join(SENTENCES[n : n + 5]) for n in range(0, 300, 5))
    )
    return path


def suite(text: Path, **options: object) -> NeedleSuite:
    tasks = TaskOptions(haystack=text, **options)  # type: ignore[arg-type]
    return NeedleSuite.from_options(SuiteOptions(tasks=tasks))


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_needle_lies_at_its_depth(depth: float) -> None:
    haystack = Haystack(
        [" ".join(SENTENCES[n : n + 5]) for n in range(0, 300, 5)],
        PromptEncoder(byte_tokenizer()),
    )
    assert haystack.tokens == 300 * len(SENTENCES[0])
    hidden = haystack.hide("NEEDLE.", 1000, depth, random.Random(1))
    before, found, after = hidden.partition("NEEDLE.")
    assert found
    # 39 sentences of 26 tokens; the blanks between them are not counted.
    count = before.count("Sentence"), after.count("Sentence")
    assert sum(count) == 39
    assert abs(count[0] * 26 - depth * 1000) <= 26
    if depth == 1.0:
        assert not after


def test_items_are_the_same_every_time(text: Path) -> None:
    first, second = suite(text, items=6), suite(text, items=6)
    for each in (first, second):
        each.prepare(byte_tokenizer(), 8192)
    assert first.found == second.found
    assert first.settings() == second.settings()
    other = suite(text, items=6, seed=1)
    other.prepare(byte_tokenizer(), 8192)
    assert other.found.items[0].prompt != first.found.items[0].prompt


def test_items_take_the_depths_in_turn_and_hold_their_answer(text: Path) -> None:
    needle = suite(text, items=6, needle_tokens=600, needle_depths=(0.0, 1.0))
    tokenizer = byte_tokenizer(chat=True)
    demand = needle.prepare(tokenizer, 8192)
    groups = [item.draft.group for item in needle.found.items]
    assert groups == ["depth   0 %", "depth 100 %"] * 3
    numbers = {item.draft.accepted[0] for item in needle.found.items}
    assert len(numbers) == 6
    for item in needle.found.items:
        prompt = tokenizer.decode(item.prompt)
        assert prompt.count(item.draft.accepted[0]) == 1
        assert prompt.endswith("[assistant]The secret number of the archive is")
    longest = max(len(item.prompt) for item in needle.found.items)
    assert demand.request_tokens == longest + 16
    assert (demand.num_seqs, needle.prefix) == (6, ())


def test_too_long_for_the_model_is_an_error(text: Path) -> None:
    with pytest.raises(EvalError, match=r"none of 20 items fits .* 512 tokens"):
        suite(text, items=2, needle_tokens=600).prepare(byte_tokenizer(), 512)


def test_a_short_text_is_an_error(text: Path) -> None:
    with pytest.raises(EvalError, match=r"has 7800 tokens; a text of 9000"):
        suite(text, needle_tokens=9000).prepare(byte_tokenizer(), 16384)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"needle_tokens": 10}, "hides nothing; at least 64"),
        ({"needle_depths": (0.5, 1.5)}, "between 0 and 1"),
        ({"needle_depths": ()}, "between 0 and 1"),
        ({"items": 0}, "needle: items must be at least 1, not 0"),
        ({"batch": 0}, "needle: batch must be at least 1, not 0"),
    ],
)
def test_options_that_make_no_sense(text: Path, options: dict, words: str) -> None:
    with pytest.raises(EvalError, match=words):
        suite(text, **options)


def test_a_missing_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"needle: there is no file .*none.txt"):
        suite(tmp_path / "none.txt")


def test_passages_come_from_jsonl_and_from_text(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"ctxs": [{"text": "One\ntwo."}, {"text": "Three."}]}))
    assert read_passages(lines) == ["One two.", "Three."]
    plain = tmp_path / "a.md"
    plain.write_text("One  two.\n\n\nThree.\n")
    assert read_passages(plain) == ["One two.", "Three."]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"ctxs": [{"title": "x"}]}', "line 1: an entry of 'ctxs'"),
        ("a.jsonl", b'{"text": "x"}', "line 1: no field 'ctxs'; there are: text"),
        ("a.txt", b" \n", "has no text"),
        ("a.txt", b"\xff\xfe", "cannot read"),
    ],
)
def test_bad_texts(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(EvalError, match=words):
        read_passages(path)
