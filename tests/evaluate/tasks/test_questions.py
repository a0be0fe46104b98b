# SPDX-License-Identifier: Apache-2.0
"""GSM8K and files of one's own."""

import json
from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.evaluate.options import SuiteOptions, TaskOptions
from polykv_vllm.evaluate.tasks.questions import (
    QUESTIONS_FILE,
    SHOTS_FILE,
    Gsm8kSuite,
    JsonlSuite,
)
from tests.evaluate.byte_tokenizer import byte_tokenizer


def write(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def sums(folder: Path, **options: Any) -> Gsm8kSuite:
    tasks = TaskOptions(data=folder, **options)
    return Gsm8kSuite.from_options(SuiteOptions(tasks=tasks))


def sum_of(n: int) -> dict[str, str]:
    return {
        "question": f"What is {n} and {n}, if one adds them up?",
        "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}",
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / SHOTS_FILE, *map(sum_of, range(1, 6)))
    write(tmp_path / QUESTIONS_FILE, *map(sum_of, range(21, 24)))
    return tmp_path


def test_all_questions_share_the_examples(folder: Path) -> None:
    suite = sums(folder, shots=3)
    demand = suite.prepare(byte_tokenizer(), 8192)
    tokenizer = byte_tokenizer()
    prefix = tokenizer.decode(suite.prefix)
    assert prefix.count("####") == 3
    # The three questions begin alike, too.
    assert prefix.endswith("#### 6\n\nQuestion: What is 2")
    (first, *_) = suite.found.items
    assert tokenizer.decode(first.prompt).endswith("21, if one adds them up?\nAnswer:")
    assert first.draft.accepted == ("42",)
    assert suite.match()("21 + 21 = 42\n#### 42", first.draft.accepted)
    prompts = sum(len(item.prompt) + 256 for item in suite.found.items)
    assert demand.live_tokens == prompts + len(suite.prefix)


def test_too_few_examples_are_an_error(folder: Path) -> None:
    with pytest.raises(EvalError, match=r"6 worked examples asked for, .* has 5"):
        sums(folder, shots=6).prepare(byte_tokenizer(), 8192)
    with pytest.raises(EvalError, match="at least one worked example"):
        sums(folder, shots=0)


def test_a_question_without_a_result_is_an_error(folder: Path) -> None:
    write(folder / QUESTIONS_FILE, sum_of(1), {"question": "x", "answer": "1"})
    with pytest.raises(EvalError, match="line 2: 'answer' has no '####'"):
        sums(folder, shots=1).prepare(byte_tokenizer(), 8192)


def own(path: Path | None, **options: Any) -> JsonlSuite:
    tasks = TaskOptions(file=path, **options)
    return JsonlSuite.from_options(SuiteOptions(tasks=tasks))


def test_own_fields_and_lists_of_answers(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", {"q": "Red?", "a": ["yes", 1]})
    suite = own(path, prompt_field="q", answer_field="a", match="exact")
    suite.prepare(byte_tokenizer(), 100)
    (item,) = suite.found.items
    assert byte_tokenizer().decode(item.prompt) == "<s>Red?"
    assert suite.match()("YES", item.draft.accepted)
    assert not suite.match()("yes it is", item.draft.accepted)
    settings = suite.settings()
    assert settings["match"] == "exact" and settings["item_ids"] == ["0001"]
    assert list(settings["files"]) == ["own.jsonl"]


def test_other_content_is_another_setting(tmp_path: Path) -> None:
    def settings(answer: str) -> dict:
        path = write(tmp_path / "own.jsonl", {"prompt": "Red?", "answer": answer})
        suite = own(path)
        suite.prepare(byte_tokenizer(), 100)
        return suite.settings()

    assert settings("yes") == settings("yes") != settings("no")


def test_what_a_file_may_lack(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="--tasks-file"):
        own(None)
    with pytest.raises(EvalError, match="there is no file"):
        own(tmp_path / "none.jsonl")
    path = write(tmp_path / "own.jsonl", {"prompt": "a", "answer": "b"}, {"text": "a"})
    with pytest.raises(EvalError, match="no match 'regex'; there are: exact, contains"):
        own(path, match="regex")
    with pytest.raises(EvalError, match="line 2: no field 'prompt'; there are: text"):
        own(path).prepare(byte_tokenizer(), 100)
    own(path, items=1).prepare(byte_tokenizer(), 100)  # line 2 is not asked for
