# SPDX-License-Identifier: Apache-2.0
"""Names on disk: what is written is found, and nothing else is believed."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.pool.disk.names import NamesDirectory, StoredPrefix

PREFIX = StoredPrefix("agents", "tenant", (1, 2, 40_000), 3600.0, 1e9, True)


@pytest.fixture
def names(tmp_path: Path) -> NamesDirectory:
    return NamesDirectory(tmp_path / "names")


def stored(names: NamesDirectory) -> list[StoredPrefix]:
    """Return what is there, without the times of the files."""
    return [replace(prefix, used_s=0.0) for prefix in names.load()]


def only_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "names").iterdir()
    return path


def test_what_is_saved_is_found(names: NamesDirectory, tmp_path: Path) -> None:
    assert names.load() == []
    others = [
        replace(PREFIX, salt=None, created_s=2e9),
        replace(PREFIX, salt="ä", ttl_s=None, is_pinned=False, created_s=3e9),
    ]
    for prefix in (*others, PREFIX):
        names.save(prefix)
    assert stored(names) == [PREFIX, *others]  # the oldest first
    names.save(replace(PREFIX, token_ids=(7,)))
    assert stored(names)[0].token_ids == (7,)
    names.remove("tenant", "agents")
    names.remove("tenant", "agents")
    assert stored(names) == others
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "names").iterdir()}
    assert modes == {0o600}
    assert (tmp_path / "names").stat().st_mode & 0o777 == 0o700


def test_a_hit_is_the_time_of_the_file(names: NamesDirectory, tmp_path: Path) -> None:
    names.save(PREFIX)
    os.utime(only_file(tmp_path), (1e9, 1e9))
    assert names.load()[0].used_s == 1e9
    names.touch("tenant", "agents")
    assert names.load()[0].used_s > 1.7e9
    names.touch("tenant", "nobody")  # nothing to note, and no error


def edited(**changes: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def replaced_by_link(path: Path) -> None:
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)


def replaced_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (lambda path: path.write_text("{"), "JSON"),
        (lambda path: path.write_bytes(b"\xff"), "the file"),
        (lambda path: path.write_text("[" * 100_000), "JSON"),
        (lambda path: os.truncate(path, 40), "JSON"),
        (lambda path: os.truncate(path, 1 << 30), "too many"),
        (edited(name="../../x"), "name"),
        (edited(name="other"), "checksum"),
        (edited(salt="other"), "checksum"),
        (edited(token_ids=[1, 2, 40_001]), "checksum"),
        (edited(token_ids=[-1]), "token_ids"),
        (edited(token_ids=[1.5]), "token_ids"),
        (edited(token_ids=[]), "token_ids"),
        (edited(ttl_s=1e99), "ttl_s"),
        (edited(is_pinned="yes"), "is_pinned"),
        (edited(more=1), "more"),
        (edited(version=2), "version 2"),
        (lambda path: path.rename(path.with_name(f"{'0' * 64}.json")), "another"),
        (lambda path: path.chmod(0o644), "others than this user"),
        (replaced_by_link, "symbolic"),
        (replaced_by_pipe, "regular"),
    ],
)
def test_what_is_not_such_a_file_is_told_and_left(
    names: NamesDirectory,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    attack: Callable[[Path], object],
    reason: str,
) -> None:
    names.save(PREFIX)
    attack(only_file(tmp_path))
    logger = logging.getLogger("vllm.polykv")
    logger.addHandler(caplog.handler)
    try:
        assert names.load() == []
    finally:
        logger.removeHandler(caplog.handler)
    assert "names no prefix" in caplog.text
    assert reason in caplog.text
    assert any((tmp_path / "names").iterdir())


def test_other_names_are_left_alone(names: NamesDirectory, tmp_path: Path) -> None:
    names.save(PREFIX)
    for name in ("notes.txt", "A" * 64 + ".json", f".{'0' * 64}.1"):
        (tmp_path / "names" / name).write_text("x")
    os.utime(tmp_path / "names" / f".{'0' * 64}.1", (1, 1))
    assert stored(names) == [PREFIX]
    left = {path.name for path in (tmp_path / "names").iterdir()}
    assert "notes.txt" in left
    assert f".{'0' * 64}.1" not in left  # what a killed server had begun


def test_a_directory_that_has_gone_is_an_error(
    names: NamesDirectory, tmp_path: Path
) -> None:
    (tmp_path / "names").write_text("a file in its place")
    with pytest.raises(OSError):
        names.save(PREFIX)
    assert names.load() == []
