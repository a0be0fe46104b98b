# SPDX-License-Identifier: Apache-2.0
"""Rules that hold for every source file."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 400
SUFFIXES = {".py", ".cpp", ".h", ".sh", ".toml", ".yaml"}


def _sources() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout: no list of the project's files")
    paths = [ROOT / name for name in done.stdout.split("\n") if name]
    return [p for p in paths if p.suffix in SUFFIXES and p.is_file()]


def test_every_file_names_its_licence() -> None:
    missing = [
        str(path.relative_to(ROOT))
        for path in _sources()
        if path.stat().st_size
        and "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:200]
    ]
    assert missing == []


def test_no_file_is_longer_than_a_reader_likes() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in _sources()
    }
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}
