# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines: what is wrong is named with its line."""

from pathlib import Path

import pytest

from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.evaluate.tasks.jsonl import Line, data_file, read_lines


def file_with(folder: Path, content: bytes) -> Path:
    path = folder / "items.jsonl"
    path.write_bytes(content)
    return path


def test_lines_are_numbered_with_blank_ones(tmp_path: Path) -> None:
    path = file_with(tmp_path, b'{"a": 1}\n\n  \n{"a": 2}\r\n')
    assert [(x.number, x.fields["a"]) for x in read_lines(path)] == [(1, 1), (4, 2)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": 1}\n{"a": \n', "line 2: not JSON"),
        (b'{"a": 1}\n\n[1, 2]\n', "line 3: a list, not an object"),
        (b'{"a": "\xff"}\n', "line 1: not JSON"),
        (b"\n\n", "has no lines"),
        (b"", "has no lines"),
    ],
)
def test_a_bad_file_is_an_error(tmp_path: Path, content: bytes, words: str) -> None:
    path = file_with(tmp_path, content)
    with pytest.raises(EvalError, match=words) as error:
        list(read_lines(path))
    assert str(path) in str(error.value)


def test_lines_before_a_bad_one_are_usable(tmp_path: Path) -> None:
    lines = read_lines(file_with(tmp_path, b'{"a": 1}\nnonsense\n'))
    assert next(lines).fields == {"a": 1}


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"cannot read .*none\.jsonl: No such file"):
        next(read_lines(tmp_path / "none.jsonl"))


LINE = Line(
    Path("f.jsonl"),
    7,
    {"text": "x", "empty": " ", "many": ["a", 2], "bad": [None], "no": [], "yes": True},
)


def test_a_missing_field_names_those_there_are() -> None:
    with pytest.raises(EvalError) as error:
        LINE.text("prompt")
    assert str(error.value) == (
        "f.jsonl, line 7: no field 'prompt'; there are: text, empty, many, bad, no, yes"
    )


@pytest.mark.parametrize("name", ["many", "empty", "yes"])
def test_a_text_is_a_string_with_something_in_it(name: str) -> None:
    with pytest.raises(EvalError, match=f"line 7: field '{name}' is"):
        LINE.text(name)


def test_texts_may_be_one_or_several() -> None:
    assert LINE.text("text") == "x"
    assert LINE.texts("text") == ("x",)
    assert LINE.texts("many") == ("a", "2")


@pytest.mark.parametrize("name", ["bad", "no", "yes"])
def test_texts_refuse_what_is_no_text(name: str) -> None:
    with pytest.raises(EvalError, match=f"line 7: field '{name}' is"):
        LINE.texts(name)


def test_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYKV_DATA", raising=False)
    with pytest.raises(
        EvalError, match=r"lines reads a\.jsonl: .*--data or POLYKV_DATA"
    ):
        data_file(None, "a.jsonl", "lines")
    monkeypatch.setenv("POLYKV_DATA", str(tmp_path))
    with pytest.raises(EvalError, match=f"which {tmp_path} does not have"):
        data_file(None, "a.jsonl", "lines")
    (tmp_path / "a.jsonl").touch()
    assert data_file(None, "a.jsonl", "lines") == tmp_path / "a.jsonl"
    with pytest.raises(EvalError, match="does not have"):  # --data goes first
        data_file(tmp_path / "other", "a.jsonl", "lines")
