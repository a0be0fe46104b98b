# SPDX-License-Identifier: Apache-2.0
"""JSON files: complete, and without what JSON does not have."""

import json
import math
from pathlib import Path

import pytest

from polykv_vllm.reporting.files import write_json


def test_what_is_no_number_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"a": [1.5, math.nan], "b": {"c": math.inf}})
    assert json.loads(path.read_text()) == {"a": [1.5, None], "b": {"c": None}}


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
