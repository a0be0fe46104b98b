# SPDX-License-Identifier: Apache-2.0
"""Bytes from a cache to files and back."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from polykv_vllm.pool.disk.blockfile import HEADER_BYTES
from polykv_vllm.pool.disk.identity import RankIdentity
from polykv_vllm.pool.disk.messages import BlockAt, Orders
from polykv_vllm.pool.disk.worker import CacheBlocks, PoolWorker, open_worker

IDENTITY = RankIdentity({"weights": "a", "place": {"rank": 0}})
BLOCK_BYTES = 2 * 32 * 92 + 4 * 32 * 52


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture
def caches() -> dict[str, torch.Tensor]:
    """Two layers of different shapes; as vLLM has them, parts of larger storage."""
    torch.manual_seed(0)
    first = torch.randint(256, (20, 2, 32, 92), dtype=torch.uint8)
    second = torch.randint(256, (20, 2, 4, 32, 52), dtype=torch.uint8)[:, 1]
    return {"first": first, "second": second}


@pytest.fixture
def worker(caches: dict[str, torch.Tensor], tmp_path: Path) -> Iterator[PoolWorker]:
    worker = start(caches, tmp_path / "pool")
    assert worker is not None
    yield worker
    worker.close()


def start(
    caches: dict[str, torch.Tensor],
    path: Path,
    models: tuple[torch.nn.Module, ...] = (),
) -> PoolWorker | None:
    return open_worker(caches, lambda layers: IDENTITY, path, 1 << 30, models)


def written(worker: PoolWorker) -> None:
    worker._writer.close()


def test_a_block_goes_out_and_comes_back_elsewhere(
    caches: dict[str, torch.Tensor], worker: PoolWorker
) -> None:
    worker.load(Orders())
    worker.save(Orders(save=[BlockAt(name(1), 5), BlockAt(name(2), 6)]))
    written(worker)
    (file, _) = sorted(worker.store.rank.glob("??/*"))
    assert file.stat().st_size == HEADER_BYTES + BLOCK_BYTES
    before = {layer: cache.clone() for layer, cache in caches.items()}
    worker.load(Orders(load=[BlockAt(name(1), 9), BlockAt(name(2), 0)]))
    assert worker.take_failed() == set()
    for layer, cache in caches.items():
        assert torch.equal(cache[9], before[layer][5])
        assert torch.equal(cache[0], before[layer][6])
        others = [n for n in range(20) if n not in (0, 9)]
        assert torch.equal(cache[others], before[layer][others])


def test_nothing_of_a_step_with_a_failed_load_is_saved(worker: PoolWorker) -> None:
    """It may rest on what was not there; saves come last, or after the report."""
    worker.load(Orders(load=[BlockAt(name(7), 3)]))
    assert worker.take_failed() == {3}
    worker.save(Orders(save=[BlockAt(name(1), 5)]))
    worker.load(Orders())
    assert worker.take_failed() == set()
    worker.save(Orders(save=[BlockAt(name(2), 5)]))
    written(worker)
    assert name(1) not in worker.store and name(2) in worker.store


def test_after_the_weights_have_changed_nothing_is_stored_or_read(
    caches: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = torch.nn.Linear(8, 8)
    worker = start(caches, tmp_path / "pool", (model,))
    assert worker is not None
    worker.load(Orders())
    worker.save(Orders(save=[BlockAt(name(1), 5)]))
    with torch.no_grad():
        model.weight.add_(1)
    worker.save(Orders(save=[BlockAt(name(2), 5)]))
    worker.load(Orders(load=[BlockAt(name(1), 3)]))
    assert worker.take_failed() == {3}
    worker.close()
    again = start(caches, tmp_path / "pool")
    assert again is not None and again.store.num_blocks == 1
    again.close()


def test_what_waits_when_all_is_removed_is_not_written(worker: PoolWorker) -> None:
    worker.load(Orders())
    with worker._writer._writing:  # the writer is held up
        worker.save(Orders(save=[BlockAt(name(n), n) for n in range(1, 9)]))
    worker.load(Orders(clear=True))
    written(worker)
    assert not list(worker.store.rank.glob("??/*"))


def test_counts_are_told_once(worker: PoolWorker) -> None:
    worker.load(Orders(load=[BlockAt(name(7), 3)]))
    assert worker.take_counts()["missing"] == 1
    assert worker.take_counts()["missing"] == 0


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(4, 2, 32, 64, dtype=torch.bfloat16),
        torch.zeros(4, 2, 32, 92, dtype=torch.uint8).transpose(1, 2),
        torch.zeros(4, 2, 32, dtype=torch.uint8),
    ],
)
def test_other_caches_are_not_kept(cache: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the cache of x"):
        CacheBlocks({"x": cache})
    assert start({"x": cache}, tmp_path / "pool") is None
