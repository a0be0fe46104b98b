# SPDX-License-Identifier: Apache-2.0
"""What agents ask."""

from pathlib import Path

import pytest

from polykv_vllm.evaluate.agent_questions import QUESTIONS, read_questions
from polykv_vllm.evaluate.errors import EvalError


def test_fifteen_agents_have_a_question_each() -> None:
    assert len(set(QUESTIONS)) == len(QUESTIONS) >= 15
    assert read_questions(None, 15) == list(QUESTIONS)


def test_own_questions_come_first(tmp_path: Path) -> None:
    path = tmp_path / "q.txt"
    path.write_text(f" Who? \n\nWhy?\n{QUESTIONS[3]}\n")
    found = read_questions(path, 17)
    assert found[:3] == ["Who?", "Why?", QUESTIONS[3]]
    assert len(found) == len(set(found)) == len(QUESTIONS) + 2


def test_what_is_wrong_with_questions_is_said(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"16 agents ask .* there are 15: --questions"):
        read_questions(None, 16)
    with pytest.raises(EvalError, match=r"cannot read the questions of .*none\.txt"):
        read_questions(tmp_path / "none.txt", 1)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(EvalError, match=r"empty\.txt has no questions"):
        read_questions(tmp_path / "empty.txt", 1)
