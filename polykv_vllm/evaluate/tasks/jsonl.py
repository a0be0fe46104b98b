# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines, whose errors name the line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polykv_vllm.envs import data_dir
from polykv_vllm.evaluate.errors import EvalError


@dataclass(frozen=True)
class Line:
    """One object of a file.

    Attributes:
        path: The file.
        number: Of the line, from 1.
        fields: What it says.

    """

    path: Path
    number: int
    fields: dict[str, Any]

    def error(self, words: str) -> EvalError:
        """Return an error that says where it is."""
        return EvalError(f"{self.path}, line {self.number}: {words}")

    def get(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """Return a field.

        Raises:
            EvalError: It is missing, or of another type; names the fields there are.

        """
        if name not in self.fields:
            there = ", ".join(self.fields) or "none"
            raise self.error(f"no field {name!r}; there are: {there}")
        value = self.fields[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.error(f"field {name!r} is a {type(value).__name__}: {value!r}")
        return value

    def text(self, name: str) -> str:
        """Return a field that is a string with something in it.

        Raises:
            EvalError: It is not.

        """
        value: str = self.get(name, str)
        if not value.strip():
            raise self.error(f"field {name!r} is empty")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a field that is a string, a number, or a list of these, as strings.

        Raises:
            EvalError: It is something else, or an empty list.

        """
        value = self.get(name, (str, int, float, list))
        values = value if isinstance(value, list) else [value]
        texts = tuple(
            str(v)
            for v in values
            if isinstance(v, str | int | float) and not isinstance(v, bool)
        )
        if not texts or len(texts) < len(values):
            raise self.error(f"field {name!r} is no text, number or list of them")
        return texts


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the objects of a file one by one; blank lines are passed over.

    Raises:
        EvalError: The file cannot be read or has no lines; a line is no JSON object.

    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise EvalError(f"cannot read {path}: {error.strerror}") from error
    found = False
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        try:
            fields = json.loads(raw)
        except ValueError as error:  # not UTF-8 is one, too
            raise EvalError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(fields, dict):
            kind = type(fields).__name__
            raise EvalError(f"{path}, line {number}: a {kind}, not an object")
        found = True
        yield Line(path, number, fields)
    if not found:
        raise EvalError(f"{path} has no lines")


def data_file(folder: Path | None, name: str, task: str) -> Path:
    """Return the path of a task's file.

    Args:
        folder: From the command line; None: `POLYKV_DATA`.
        name: Of the file.
        task: Named in errors.

    Raises:
        EvalError: No folder is known, or it has no such file.

    """
    folder = folder or data_dir()
    if folder is None:
        raise EvalError(
            f"{task} reads {name}: name its folder with --data or POLYKV_DATA"
        )
    path = folder / name
    if not path.is_file():
        raise EvalError(
            f"{task} reads {name}, which {folder} does not have; "
            "--data or POLYKV_DATA names the folder"
        )
    return path
