# SPDX-License-Identifier: Apache-2.0
"""From text files to sequences of tokens."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polykv_vllm.calibrate.errors import CalibrationError
from polykv_vllm.evaluate import text
from polykv_vllm.evaluate.errors import EvalError

DEFAULT_FIELD = "text"


def read_texts(paths: Sequence[Path], field: str = DEFAULT_FIELD) -> str:
    """Return the text of all files, documents apart by an empty line.

    Args:
        paths: Text; `.jsonl` files have a document a line.
        field: Of a line of `.jsonl`, dots between levels; every element of a list is
            looked into: `ctxs.text` is the text of all `ctxs`.

    Raises:
        CalibrationError: A file cannot be read, or no line has the field.

    """
    documents: list[str] = []
    for path in paths:
        try:
            content = text.read_text(path)
        except EvalError as error:
            raise CalibrationError(str(error)) from error
        if path.suffix == ".jsonl":
            documents += _documents(path, content, field)
        else:
            documents.append(content)
    return "\n\n".join(documents)


def cut_sequences(
    content: str, tokenizer: Any, count: int, length: int, seed: int
) -> list[tuple[int, ...]]:
    """Return sequences from all over a text, each token in at most one.

    Args:
        content: The text.
        tokenizer: Of the model.
        count: Most sequences.
        length: Tokens of a sequence, a beginning-of-sequence token included.
        seed: Of the choice, where the text has more.

    Raises:
        CalibrationError: The text is shorter than one sequence.

    """
    leading = text.leading_tokens(tokenizer)
    tokens = text.tokenize(content, tokenizer)
    try:
        sequences = text.cut_text(tokens, leading, text.Cut(length))
    except EvalError as error:
        raise CalibrationError(
            f"the calibration text has {len(tokens):,} tokens, one sequence takes "
            f"{length:,}: choose --sequence-tokens {len(tokens) + len(leading)} or "
            "less, or a longer text"
        ) from error
    chosen = random.Random(seed).sample(
        range(len(sequences)), min(count, len(sequences))
    )
    return [sequences[index] for index in sorted(chosen)]


def _documents(path: Path, content: str, field: str) -> list[str]:
    found: list[str] = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise CalibrationError(
                f"{path}, line {number} is no JSON: {error}"
            ) from None
        own = [each for each in _values(record, field.split(".")) if each.strip()]
        if not own:
            names = ", ".join(record) if isinstance(record, dict) else "none"
            raise CalibrationError(
                f"{path}, line {number} has no text in the field {field!r}; fields: "
                f"{names} (--field a.b looks into them)"
            )
        found += own
    return found


def _values(record: Any, path: list[str]) -> Iterator[str]:
    """Yield the strings at a path, from all elements of lists on the way."""
    if isinstance(record, list):
        for each in record:
            yield from _values(each, path)
    elif path and isinstance(record, dict) and path[0] in record:
        yield from _values(record[path[0]], path[1:])
    elif not path and isinstance(record, str):
        yield record
