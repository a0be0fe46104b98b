# SPDX-License-Identifier: Apache-2.0
"""The output folder: one JSON file for each finished run, so that runs can go on."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polykv_vllm.bench.errors import BenchError
from polykv_vllm.bench.scenario import Scenario
from polykv_vllm.reporting.files import write_json

SPEED, MEMORY, DISTINCT = "speed", "memory", "distinct"


@dataclass(frozen=True)
class RunKey:
    """Which run: its kind, the arm, and for speed the case and the repetition."""

    kind: str
    arm: str
    case: str = ""
    repetition: int = 0

    def __str__(self) -> str:
        if self.kind != SPEED:
            return f"{self.kind}, {self.arm}"
        return f"{self.case}, {self.arm}, repetition {self.repetition + 1}"

    @property
    def file_name(self) -> str:
        """One for each run."""
        if self.kind != SPEED:
            return f"{self.kind}.{self.arm}.json"
        return f"{self.kind}.{self.case}.{self.arm}.{self.repetition + 1}.json"


class ResultFolder:
    """Results of one scenario on one machine.

    Args:
        path: Created if needed.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs = path / "runs"

    def open(self, scenario: Scenario, model: str, fresh: bool) -> None:
        """Prepare the folder; keep what an earlier, equal call has measured.

        Args:
            scenario: What is measured.
            model: The model's directory or name, as served.
            fresh: Delete earlier results.

        Raises:
            BenchError: It holds results of another scenario or model.

        """
        if fresh and self._runs.exists():
            shutil.rmtree(self._runs)
        record = {"scenario": _what_counts(scenario), "model": model}
        stamp = self.path / "scenario.json"
        if self._runs.exists() and any(self._runs.iterdir()) and stamp.exists():
            earlier = json.loads(stamp.read_text())
            if changed := _differences(earlier, record):
                raise BenchError(
                    f"{self.path} holds results of another scenario (it differs in "
                    f"{', '.join(changed)}): choose another --output, or --fresh to "
                    "delete them"
                )
        self._runs.mkdir(parents=True, exist_ok=True)
        write_json(stamp, record)

    def find(self, key: RunKey) -> dict[str, Any] | None:
        """Return a finished run, or None."""
        path = self._runs / key.file_name
        if not path.exists():
            return None
        record: dict[str, Any] = json.loads(path.read_text())
        return record

    def save(self, key: RunKey, record: dict[str, Any]) -> None:
        """Keep a finished run; the file appears complete or not at all."""
        write_json(self._runs / key.file_name, record)


def _what_counts(scenario: Scenario) -> dict[str, Any]:
    """Return what makes runs comparable.

    Lists of arms and cases may grow, and requirements are no measurement.
    """
    left_out = ["about", "arms", "agents", "shared_tokens", "repetitions", "bars"]
    exclude: Any = {**dict.fromkeys(left_out, True), "distinct": {"at_least": True}}
    record: dict[str, Any] = json.loads(scenario.model_dump_json(exclude=exclude))
    return record


def _differences(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    before, after = ({**r["scenario"], "model": r["model"]} for r in (earlier, now))
    keys = sorted(set(before) | set(after))
    return [key for key in keys if before.get(key) != after.get(key)]
