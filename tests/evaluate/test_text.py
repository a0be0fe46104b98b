# SPDX-License-Identifier: Apache-2.0
"""Chunks of a text: sizes, what stands in front, and what cannot be cut."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polykv_vllm.evaluate import text
from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.evaluate.text import Cut, cut_text


class Words:
    """A tokenizer of words: a token is a word's length."""

    bos_token_id: int | None = None

    def __call__(self, words: str, add_special_tokens: bool = True, **_: Any) -> Any:
        ids = [len(word) for word in words.split()]
        before = [self.bos_token_id] if self.bos_token_id and add_special_tokens else []
        return SimpleNamespace(input_ids=[*before, *ids])


def test_chunks_do_not_overlap_and_none_is_short() -> None:
    chunks = cut_text(range(25), [], Cut(10))
    assert chunks == [tuple(range(10)), tuple(range(10, 20))]


def test_each_chunk_starts_with_what_the_model_expects() -> None:
    chunks = cut_text(range(100, 120), [7], Cut(10))
    assert [chunk[0] for chunk in chunks] == [7, 7]
    assert chunks[0][1:] == tuple(range(100, 109))
    assert chunks[1][1:] == tuple(range(109, 118)), "no token of the text is skipped"
    assert {len(chunk) for chunk in chunks} == {10}


def test_stride_and_most_chunks() -> None:
    chunks = cut_text(range(100), [], Cut(10, stride=5, max_chunks=3))
    assert [chunk[0] for chunk in chunks] == [0, 5, 10]
    assert len(cut_text(range(20), [], Cut(10, max_chunks=9))) == 2


def test_the_second_half_is_scored_unless_told() -> None:
    assert Cut(2048).begin == 1024
    assert Cut(2048, score_from=1).begin == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk_tokens": 1}, "1 token"),
        ({"chunk_tokens": 8, "score_from": 8}, r"position 8 of 8.*1\.\.7"),
        ({"chunk_tokens": 8, "score_from": 0}, "never predicted"),
        ({"chunk_tokens": 8, "stride": 0}, "stride of 0"),
        ({"chunk_tokens": 8, "max_chunks": 0}, "0 chunks"),
    ],
)
def test_impossible_cuts(options: dict[str, int], words: str) -> None:
    with pytest.raises(EvalError, match=words):
        Cut(**options)


def test_a_text_shorter_than_a_chunk_says_what_fits() -> None:
    with pytest.raises(EvalError, match=r"9 tokens, one chunk takes 31.*10 or less"):
        cut_text(range(9), [2], Cut(32))
    assert len(cut_text(range(9), [2], Cut(10))) == 1


def test_files(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="No such file"):
        text.read_text(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(EvalError, match="is empty"):
        text.read_text(tmp_path / "empty.txt")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(EvalError, match="not UTF-8"):
        text.read_text(tmp_path / "bytes.txt")
    with pytest.raises(EvalError, match="directory"):
        text.read_text(tmp_path)


def test_only_a_beginning_of_sequence_token_leads() -> None:
    tokenizer = Words()
    assert text.leading_tokens(tokenizer) == []
    tokenizer.bos_token_id = 2
    assert text.leading_tokens(tokenizer) == [2]
    assert text.tokenize("a bc def", tokenizer) == [1, 2, 3]


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(EvalError, match=f"no tokenizer for {tmp_path}"):
        text.load_tokenizer(str(tmp_path))
