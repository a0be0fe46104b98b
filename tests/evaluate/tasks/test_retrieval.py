# SPDX-License-Identifier: Apache-2.0
"""Keys and lines: small files made here, and the real ones where they are."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.evaluate.options import SuiteOptions, TaskOptions
from polykv_vllm.evaluate.tasks import TASKS
from polykv_vllm.evaluate.tasks.retrieval import (
    KV_FILE,
    LINES_FILE,
    RULER_FILE,
    window,
)
from polykv_vllm.evaluate.tasks.suite import TaskSuite
from tests.evaluate.byte_tokenizer import byte_tokenizer

DATA = Path(os.environ.get("POLYKV_DATA", Path(__file__).parents[4] / "shared/data"))


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 9), st.data())
def test_a_window_holds_the_record(
    count: int, kept: int, seed: int, data: st.DataObject
) -> None:
    gold = data.draw(st.integers(0, count - 1))
    found = window(range(count), kept, gold, random.Random(seed))
    assert len(found) == min(count, kept) and gold in found
    assert found == list(range(found[0], found[0] + len(found)))


def test_windows_put_the_record_anywhere() -> None:
    places = {
        window(range(9), 3, 4, random.Random(seed)).index(4) for seed in range(40)
    }
    assert places == {0, 1, 2}


def prepared(name: str, folder: Path, **options: Any) -> TaskSuite:
    tasks = TaskOptions(data=folder, **options)
    suite = TASKS[name].from_options(SuiteOptions(tasks=tasks))
    suite.prepare(byte_tokenizer(), 100_000)
    return suite


def texts(suite: TaskSuite) -> list[tuple[str, str]]:
    """Return (prompt, expected continuation) of each item."""
    tokenizer = byte_tokenizer()
    return [
        (tokenizer.decode(item.prompt), tokenizer.decode(item.answer))
        for item in suite.found.items
    ]


def write(folder: Path, name: str, *records: dict) -> None:
    (folder / name).write_text("".join(json.dumps(each) + "\n" for each in records))


def test_keys_are_cut_to_a_number(tmp_path: Path) -> None:
    pairs = [[f"k{n}", f"v{n}"] for n in range(10)]
    record = {"ordered_kv_records": pairs, "key": "k7", "value": "v7"}
    write(tmp_path, KV_FILE, record, record)
    suite = prepared("kv_retrieval", tmp_path, kv_keys=4)
    assert [item.id for item in suite.found.items] == ["4-0001", "4-0002"]
    assert suite.found.asked == 20
    (prompt, answer), *_ = texts(suite)
    table = json.loads(prompt[prompt.index("{") : prompt.index("}") + 1])
    assert len(table) == 4 and table["k7"] == "v7"
    assert prompt.endswith('The value of "k7" is') and answer == ' "v7"'


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"key": "a", "value": "b"}, "line 1: no field 'ordered_kv_records'"),
        (
            {"ordered_kv_records": [["x", "y"]], "key": "a", "value": "b"},
            "line 1: key 'a' is not in",
        ),
        (
            {"ordered_kv_records": [["a", 1]], "key": "a", "value": "b"},
            "line 1: 'ordered_kv_records' is no list of pairs",
        ),
    ],
)
def test_bad_keys(tmp_path: Path, record: dict, words: str) -> None:
    write(tmp_path, KV_FILE, record)
    with pytest.raises(EvalError, match=words):
        prepared("kv_retrieval", tmp_path)


def lines_record(count: int, gold: int) -> dict:
    rows = [f"line a-{n}: REGISTER_CONTENT is <{100 + n}>" for n in range(count)]
    return {
        "expected_number": 100 + gold,
        "correct_line": rows[gold] + "\n",
        "prompt": "\n".join(["The record:", "", *rows, "", "Which is it? "]),
    }


def test_lines_are_cut_to_a_number(tmp_path: Path) -> None:
    write(tmp_path, LINES_FILE, lines_record(30, 12))
    ((prompt, answer),) = texts(prepared("lines", tmp_path, lines=5))
    assert prompt.count("REGISTER_CONTENT is <") == 5
    assert "line a-12: REGISTER_CONTENT is <112>\n" in prompt
    assert prompt.startswith("<s>The record:\n\nline a-")
    assert prompt.endswith(
        ">\n\nWhich is it?\n\nThe <REGISTER_CONTENT> in line a-12 is"
    )
    assert answer == " <112>"


def test_lines_without_the_line_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, LINES_FILE, lines_record(5, 1) | {"correct_line": "line b: 1"})
    with pytest.raises(EvalError, match="line 1: 'correct_line' is not a line"):
        prepared("lines", tmp_path)


def test_rulers_answer_begins_where_its_prompt_ends(tmp_path: Path) -> None:
    text = "x: 1.\nWhat is x? The x mentioned is"
    write(tmp_path, RULER_FILE, {"input": text, "outputs": ["1"]})
    ((prompt, answer),) = texts(prepared("ruler", tmp_path))
    assert prompt == "<s>x: 1.\nWhat is x?\n\nThe x mentioned is"
    assert answer == " 1"
    write(tmp_path, RULER_FILE, {"input": "no question", "outputs": ["1"]})
    with pytest.raises(EvalError, match="line 1: 'input' has no question"):
        prepared("ruler", tmp_path)


@pytest.mark.parametrize(
    ("name", "options"), [("kv_retrieval", {"kv_keys": 1}), ("lines", {"lines": 1})]
)
def test_one_record_is_no_retrieval(tmp_path: Path, name: str, options: dict) -> None:
    for file in (KV_FILE, LINES_FILE):
        (tmp_path / file).touch()
    with pytest.raises(EvalError, match=f"{name}: at least 2"):
        prepared(name, tmp_path, **options)


@pytest.mark.skipif(not DATA.is_dir(), reason="POLYKV_DATA is not there")
@pytest.mark.parametrize("name", ["needle", "kv_retrieval", "lines", "ruler", "gsm8k"])
def test_the_real_files_give_all_items(name: str) -> None:
    suite = prepared(name, DATA, items=40)
    assert len(suite.found.items) == len({item.id for item in suite.found.items}) == 40
    for (prompt, answer), item in zip(texts(suite), suite.found.items, strict=True):
        (accepted,) = item.draft.accepted
        if name != "gsm8k":
            assert accepted in prompt
        if answer:
            assert suite.match()(answer, item.draft.accepted)
