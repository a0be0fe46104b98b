# SPDX-License-Identifier: Apache-2.0
"""Names over a restart; `tests/e2e/test_pool_prefixes.py` has them on an engine."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from polykv_vllm.pool.kept import RESTARTED, UNPINNED, KeptNames
from polykv_vllm.pool.pins import EXPIRED, Limits, Prefix, PrefixPool

SIZE = 32
VOCABULARY = 1000
TOKENS = tuple(range(2 * SIZE + 1))


class Cache:
    """What is asked of an engine."""

    def __init__(self, path: Path | None) -> None:
        self.names_directory = path

    def is_usable(self, token_ids: Sequence[int]) -> bool:
        return all(token < VOCABULARY for token in token_ids)

    def hashes(self, salt: str | None, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        return tuple(bytes([n]) for n in range(len(token_ids) // SIZE))


class Server:
    """The names of one start over a directory."""

    def __init__(self, path: Path | None) -> None:
        blocks = BlockPool(41, enable_caching=True, hash_block_size=SIZE)
        self.pool = PrefixPool(blocks, Limits(40, 12, 0.5, SIZE))
        cache: Any = Cache(path)
        self.kept = KeptNames(cache, self.pool)
        self.kept.restore()

    def name(
        self,
        name: str,
        ttl_s: float | None = None,
        tokens: Sequence[int] = TOKENS,
        salt: str | None = None,
    ) -> Prefix:
        prefix = self.pool.define(salt, name, tokens, [b"a"], ttl_s)
        prefix.is_kept = True
        return prefix


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "names"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("vllm.polykv")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def make_older(path: Path, seconds: float) -> None:
    for file in path.iterdir():
        os.utime(file, (time.time() - seconds,) * 2)


def test_a_restart_knows_names_and_which_to_pin(path: Path) -> None:
    first = Server(path)
    first.kept.save(first.name("pinned"), is_pinned=True)
    first.kept.save(first.name("let-go"), is_pinned=False)
    first.kept.save(first.name("pinned", salt="a"), is_pinned=True)
    first.kept.save(first.name("gone"), is_pinned=True)
    first.kept.forget(None, "gone")
    second = Server(path)
    assert second.pool.prefixes.keys() == {
        (None, "pinned"),
        (None, "let-go"),
        ("a", "pinned"),
    }
    assert second.pool.get(None, "pinned").token_ids == TOKENS
    assert second.pool.get(None, "pinned").lost == RESTARTED
    assert second.pool.get(None, "let-go").lost == UNPINNED
    assert len(second.kept.waiting()) == 2


def test_a_time_to_live_goes_on_while_nobody_serves(path: Path) -> None:
    first = Server(path)
    for name, ttl_s in (("brief", 50.0), ("long", 5000.0), ("endless", None)):
        first.kept.save(first.name(name, ttl_s), is_pinned=True)
    make_older(path, 100.0)
    second = Server(path)
    assert second.pool.get(None, "brief").lost == EXPIRED
    assert {prefix.name for prefix in second.kept.waiting()} == {"long", "endless"}
    left = second.pool.seconds_left(second.pool.get(None, "long"))
    assert left == pytest.approx(4900, abs=5)
    make_older(path, -3600.0)  # the clock was set back
    third = Server(path)
    left = third.pool.seconds_left(third.pool.get(None, "long"))
    assert left == pytest.approx(5000, abs=5)  # not longer than it ever was


def test_a_hit_keeps_a_pin_over_a_restart(path: Path) -> None:
    first = Server(path)
    prefix = first.name("brief", 50.0)
    first.kept.save(prefix, is_pinned=True)
    make_older(path, 100.0)
    first.kept.note_hits([prefix])
    assert [p.name for p in Server(path).kept.waiting()] == ["brief"]
    make_older(path, 100.0)
    first.kept.note_hits([prefix])  # too soon to write again
    assert Server(path).kept.waiting() == []


def test_what_the_model_cannot_take_is_told(
    path: Path, log: pytest.LogCaptureFixture
) -> None:
    first = Server(path)
    first.kept.save(first.name("a", tokens=(VOCABULARY,) * SIZE), is_pinned=True)
    first.kept.save(first.name("b", tokens=(1, 2)), is_pinned=True)
    assert Server(path).pool.prefixes == {}
    assert "prefix a is not known: the model has other tokens" in log.text
    assert "prefix b is not known: it fills no block" in log.text


def test_what_cannot_be_written_costs_the_name_after_a_restart_only(
    path: Path, log: pytest.LogCaptureFixture
) -> None:
    """CASE 25."""
    path.write_text("a file in the directory's place")
    first = Server(path)
    first.kept.save(first.name("a"), is_pinned=True)
    first.kept.forget(None, "a")
    assert "the name a is known until the server ends" in log.text
    assert "a restart may know the name a" in log.text


def test_names_of_a_file_and_engines_without_a_disk(path: Path) -> None:
    first = Server(path)
    prefix = first.name("from-file", 10.0)
    prefix.is_kept = False
    first.kept.save(prefix, is_pinned=True)
    first.kept.note_hits([prefix])
    assert not path.exists()
    without = Server(None)
    without.kept.save(without.name("a"), is_pinned=True)
    without.kept.forget(None, "a")
