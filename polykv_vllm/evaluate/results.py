# SPDX-License-Identifier: Apache-2.0
"""The run folder: a record for each (arm, suite), and every item on the way to it.

settings.json           what makes records comparable
records/ARM.SUITE.json  finished
items/ARM.SUITE.jsonl   single items, also of unfinished suites
states/KEY.safetensors  last hidden states of the reference
logs/ARM.log            what the engine printed
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.reporting.files import write_json

_PARTS = ("records", "items", "states", "logs")
_SUITES = "suites"


@dataclass
class ItemLog:
    """Finished items of one suite in one arm; appended to as they finish.

    Attributes:
        path: The file, one JSON array `[key, item]` a line.
        done: Items by key.

    """

    path: Path
    done: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.exists():
            return
        lines = self.path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # cut off while it was written
            self.path.write_bytes(b"".join(lines := lines[:-1]))
        self.done.update(map(json.loads, lines))

    def add(self, key: str, item: Any) -> None:
        """Keep an item; it survives whatever comes next."""
        with self.path.open("a") as file:
            file.write(json.dumps([key, item]) + "\n")
        self.done[key] = item


class RunStore:
    """The folder of one model.

    Args:
        path: Created by `open`.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records_path, self.items_path, self.states, self.logs = (
            path / part for part in _PARTS
        )
        self._settings_path = path / "settings.json"

    def open(self, settings: Mapping[str, Any], fresh: bool = False) -> None:
        """Prepare the folder; keep what an earlier, equal call has measured.

        Args:
            settings: What all records depend on; under "suites", by name, what those
                of one suite do. Suites may be added later, their settings not changed.
            fresh: Delete earlier results.

        Raises:
            EvalError: It holds results of other settings; names them.

        """
        if fresh:
            for part in _PARTS:
                shutil.rmtree(self.path / part, ignore_errors=True)
            self._settings_path.unlink(missing_ok=True)
        earlier = self.settings()
        now = json.loads(json.dumps(settings))  # tuples become lists, as in the file
        if changed := _differences(earlier, now):
            raise EvalError(
                f"{self.path} holds results of other settings: {'; '.join(changed)}. "
                "Choose another --output, or --fresh to delete them"
            )
        for part in _PARTS:
            (self.path / part).mkdir(parents=True, exist_ok=True)
        suites = earlier.get(_SUITES, {}) | now.get(_SUITES, {})
        write_json(self._settings_path, {**now, _SUITES: suites})

    def settings(self) -> dict[str, Any]:
        """Return what was opened last; empty when nothing was."""
        return _read(self._settings_path) or {}

    def record(self, arm: str, suite: str) -> dict[str, Any] | None:
        """Return a finished record, or None."""
        return _read(self._record_path(arm, suite))

    def save(self, arm: str, suite: str, record: Mapping[str, Any]) -> None:
        """Keep a finished record; the file appears complete or not at all."""
        write_json(self._record_path(arm, suite), dict(record))

    def records(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return all finished records by suite and arm, oldest first."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        paths = self.records_path.glob("*.json")
        for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
            record = json.loads(path.read_text())
            found.setdefault(record["suite"], {})[record["arm"]] = record
        return found

    def items(self, arm: str, suite: str) -> ItemLog:
        """Return the items that are finished, and where more are added."""
        return ItemLog(self.items_path / f"{arm}.{suite}.jsonl")

    def _record_path(self, arm: str, suite: str) -> Path:
        return self.records_path / f"{arm}.{suite}.json"


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return e.g. "perplexity chunk_tokens was 2048, is 512" for each difference."""
    if not earlier:
        return []
    pairs = [("", earlier, now)]
    for name in earlier[_SUITES].keys() & now[_SUITES].keys():
        pairs.append((f"{name} ", earlier[_SUITES][name], now[_SUITES][name]))
    return [
        f"{prefix}{key} was {before.get(key)!r}, is {after.get(key)!r}"
        for prefix, before, after in pairs
        for key in sorted(before.keys() | after.keys())
        if key != _SUITES and before.get(key) != after.get(key)
    ]
