# SPDX-License-Identifier: Apache-2.0
"""What the packed cache holds, row by row and block by block."""

import gc

import pytest
import torch

from polykv_vllm.formats import FORMATS, get_format
from polykv_vllm.hf import PolyKVCache
from polykv_vllm.reference.cache import gather
from tests.hf.models import tiny_model, tokens

CONFIG = tiny_model("llama").config
FORMAT_LIST = list(FORMATS)


def states(count: int, rows: int = 1, seed: int = 3) -> tuple[torch.Tensor, ...]:
    """Return keys and values `[rows, 2, count, 64]`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, 2, count, 64)
    return tuple(torch.randn(shape, generator=generator) for _ in range(2))


def filled(fmt: str, chunks: list[int], block_size: int = 16) -> PolyKVCache:
    """Return a cache of one row whose three layers got the same tokens in chunks."""
    cache = PolyKVCache(CONFIG, fmt, block_size=block_size)
    key, value = states(sum(chunks))
    for k, v in zip(key.split(chunks, 2), value.split(chunks, 2), strict=True):
        for layer in range(3):
            cache.update(k, v, layer)
    return cache


def stored(cache: PolyKVCache, layer: int = 1, row: int = 0) -> torch.Tensor:
    """Return keys and values of a row, from the bytes: `[2, tokens, 2, 64]`."""
    table = torch.tensor(cache.sequences.tables[row])
    length = len(cache.sequences.real_tokens(row, cache.get_seq_length()))
    return torch.stack(
        gather(cache.store.layers[layer], table, length, 64, cache.store.fmt)
    )


@pytest.mark.parametrize("fmt", FORMAT_LIST)
def test_chunks_do_not_change_what_is_stored(fmt: str) -> None:
    """All of a tile's bytes but those of tokens that do not exist yet."""
    at_once, chunked = filled(fmt, [80]), filled(fmt, [1, 15, 33, 30, 1])
    for layer in range(3):
        tiles = [
            c.store.layers[layer][c.sequences.tables[0]] for c in (at_once, chunked)
        ]
        assert torch.equal(*tiles)  # 80 tokens fill 5 blocks


# By bits, of rows from a normal distribution: the square root of a codebook's or a
# uniform quantizer's mean squared error, and a tenth more.
KEY_ERROR = {8: 0.02, 7: 0.02, 4: 0.11, 3: 0.21, 2: 0.38}
VALUE_ERROR = {8: 0.02, 4: 0.11, 3: 0.21, 2: 0.38}


@pytest.mark.parametrize("fmt", FORMAT_LIST)
def test_dequantized_states_are_those_of_the_reference(fmt: str) -> None:
    cache = filled(fmt, [50, 7])
    keys, values = cache.layers[1].dequantized(torch.float32)
    expected = stored(cache).permute(0, 2, 1, 3)
    assert torch.equal(torch.stack([keys[0], values[0]]), expected)
    key, value = states(57)
    spec = get_format(fmt)
    assert (keys - key).norm() / key.norm() < KEY_ERROR[spec.key_bits]
    assert (values - value).norm() / value.norm() < VALUE_ERROR[spec.value_bits]


def test_padding_takes_no_block_and_reads_as_zeros() -> None:
    cache = PolyKVCache(CONFIG, "polykv_k8v8", block_size=16)
    cache.expect_padding(torch.tensor([[0] * 30 + [1] * 10, [1] * 40]))
    key, value = states(40, rows=2)
    keys, values = cache.update(key, value, 0)
    assert [len(table) for table in cache.sequences.tables] == [1, 3]
    for dequantized, given in ((keys, key), (values, value)):
        assert not dequantized[0, :, :30].any()
        torch.testing.assert_close(
            dequantized[0, :, 30:], given[0, :, 30:], atol=0.03, rtol=0.03
        )
        torch.testing.assert_close(dequantized[1], given[1], atol=0.03, rtol=0.03)


def test_a_fork_copies_the_block_that_it_writes_into_and_no_other() -> None:
    cache = filled("polykv", [40])
    before = stored(cache)
    first, second = cache.fork(), cache.fork()
    for fork, seed in ((first, 5), (second, 6)):
        for layer in range(3):
            fork.update(*states(20, seed=seed), layer)
    (own,), (a,), (b,) = (c.sequences.tables for c in (cache, first, second))
    assert a[:2] == b[:2] == own[:2]
    assert len({own[2], a[2], b[2]}) == 3
    assert torch.equal(stored(cache), before)
    for fork in (first, second):
        assert torch.equal(stored(fork)[:, :40], before)
    assert not torch.equal(stored(first)[:, 40:], stored(second)[:, 40:])


def test_the_last_holder_of_a_block_writes_in_place() -> None:
    cache = filled("polykv", [40])
    (table,) = cache.sequences.tables
    fork, blocks = cache.fork(), list(table)
    del cache
    gc.collect()
    fork.update(*states(1), 0)
    assert fork.sequences.tables == [blocks]


def test_blocks_are_free_again_when_a_fork_is_garbage() -> None:
    cache = filled("polykv", [40])
    fork = cache.fork(rows=3)
    for layer in range(3):
        fork.update(*states(20, rows=3), layer)
    held = fork.private_bytes()
    assert held == 3 * 2 * cache.store.block_bytes
    free = cache.store.num_free
    del fork
    gc.collect()
    assert cache.store.num_free == free + 6
    assert cache.private_bytes() == 3 * cache.store.block_bytes


def test_crop_forgets_the_last_tokens() -> None:
    cache = filled("polykv", [40, 30])
    cache.crop(-35)
    assert cache.get_seq_length() == 35
    assert len(cache.sequences.tables[0]) == 3
    key, value = states(70)
    for layer in range(3):
        cache.update(key[:, :, 35:], value[:, :, 35:], layer)
    assert torch.equal(stored(cache), stored(filled("polykv", [70])))


@pytest.mark.parametrize("count", [1, -71])
def test_crop_says_what_it_takes(count: int) -> None:
    with pytest.raises(ValueError, match="crop takes minus the number"):
        filled("polykv", [70]).crop(count)


def test_rows_can_be_reordered() -> None:
    cache = PolyKVCache(CONFIG, "polykv", block_size=16)
    for layer in range(3):
        cache.update(*states(20, rows=3), layer)
    rows = [stored(cache, row=row) for row in range(3)]
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    for layer in range(3):
        cache.update(*states(1, rows=3, seed=9), layer)
    for row, old in enumerate((2, 2, 0)):
        assert torch.equal(stored(cache, row=row)[:, :20], rows[old])
    assert not torch.equal(stored(cache, row=0), stored(cache, row=1))
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert cache.batch_size == 2
    cache.batch_repeat_interleave(2)
    assert torch.equal(stored(cache, row=2), stored(cache, row=3))


def test_beam_search_runs_and_is_the_same_over_dequantized_states() -> None:
    model = tiny_model("llama")
    answers = []
    for implementation in ("polykv", "sdpa"):
        model.set_attn_implementation(implementation)
        answers.append(
            model.generate(
                tokens(20),
                attention_mask=torch.ones(1, 20).long(),
                past_key_values=PolyKVCache(model.config, "polykv_k8v8"),
                do_sample=False,
                num_beams=3,
                max_new_tokens=6,
                min_new_tokens=6,
            )
        )
    assert torch.equal(*answers)


def test_reset_forgets_rows_and_blocks() -> None:
    cache = filled("polykv", [40])
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size == -1
    assert cache.store.num_free * cache.store.block_bytes == cache.store.nbytes
    cache.update(*states(5, rows=2), 0)
    assert cache.batch_size == 2


def test_another_number_of_rows_is_refused() -> None:
    cache = filled("polykv", [40])
    with pytest.raises(ValueError, match=r"2 rows for a cache of 1"):
        cache.update(*states(1, rows=2), 0)


def test_a_batch_is_not_forked() -> None:
    cache = PolyKVCache(CONFIG)
    with pytest.raises(ValueError, match=r"this one has 0 row"):
        cache.fork()
    cache.update(*states(5, rows=2), 0)
    with pytest.raises(ValueError, match=r"this one has 2 row"):
        cache.fork()


def test_transforms_are_one_for_each_layer() -> None:
    with pytest.raises(ValueError, match="2 key transforms for 3 layers"):
        PolyKVCache(CONFIG, key_transforms=[None, None])
