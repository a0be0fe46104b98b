# SPDX-License-Identifier: Apache-2.0
"""The pool benchmark, without its servers."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("vllm")

from benchmarks import pool
from polykv_vllm.pool.disk.directory import prepare_directory
from polykv_vllm.pool.disk.identity import RankIdentity
from polykv_vllm.pool.disk.store import BlockStore


def test_the_rate_is_that_of_every_block(tmp_path: Path) -> None:
    prepare_directory(tmp_path / "pool")
    identity = RankIdentity({"place": {"rank": 0}})
    store = BlockStore(tmp_path / "pool", identity, 50_000, 1 << 30)
    for number in range(5):
        store.write(bytes([number]) * 32, [bytes(50_000)])
    assert len(pool.block_files(tmp_path / "pool")) == 5
    assert pool.read_rate(tmp_path / "pool") > 0
    damaged = pool.block_files(tmp_path / "pool")[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(Exception, match="checksum"):
        pool.read_rate(tmp_path / "pool")


def test_prompts_of_two_seeds_share_no_block() -> None:
    prompts = [pool.prompt_of(seed, 3073) for seed in range(10)]
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 10


def test_only_whole_blocks_are_measured() -> None:
    app = typer.Typer()
    app.command()(pool.main)
    result = CliRunner().invoke(app, ["--tokens", "100"])
    assert result.exit_code == 2
    assert "multiple of 32" in result.output
