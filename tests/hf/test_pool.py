# SPDX-License-Identifier: Apache-2.0
"""A document's pool: what readers see, what it costs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from polykv_vllm.errors import UnsupportedError
from polykv_vllm.hf import PolyKVCache, SharedKVPool
from tests.hf.models import Characters, tiny_model, tokens

DOCUMENT = "A pool is computed once. Whoever asks reads it where it lies. " * 4
QUERIES = [" Who reads?", " Where does it lie, and why would one ask for that?", " ?"]
OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12}


def new_pool(family: str = "llama", fmt: str = "polykv_k8v8") -> SharedKVPool:
    model = tiny_model(family)
    return SharedKVPool.from_document(
        model, Characters(), DOCUMENT, fmt, block_size=16, chunk_tokens=100
    )


def answer_alone(pool: SharedKVPool, query: str) -> str:
    """Return the answer of a cache that shares nothing."""
    ids = Characters()(query, add_special_tokens=False)["input_ids"]
    prompt = torch.cat([pool.document, torch.tensor([ids])], 1)
    output = pool._model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=PolyKVCache.for_model(pool._model, "polykv_k8v8"),
        do_sample=False,
        **OPTIONS,
    )
    return Characters().batch_decode(output[:, prompt.shape[1] :], True)[0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_readers_answer_as_with_a_cache_of_their_own(family: str) -> None:
    pool = new_pool(family)
    expected = [answer_alone(pool, query) for query in QUERIES]
    assert len(set(expected)) == len(expected)
    assert [pool.generate(query, **OPTIONS) for query in QUERIES] == expected
    assert pool.generate_many(QUERIES, **OPTIONS) == expected


def test_readers_in_threads_do_not_disturb_each_other() -> None:
    pool = new_pool()
    queries = QUERIES * 4
    expected = [pool.generate(query, **OPTIONS) for query in queries]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda q: pool.generate(q, **OPTIONS), queries))
    assert answers == expected


def test_readers_leave_the_document_as_it_is() -> None:
    pool = new_pool()
    (table,) = pool._cache.sequences.tables
    before = [layer[table].clone() for layer in pool._cache.store.layers]
    pool.generate_many(QUERIES, **OPTIONS)
    for layer, bytes_before in zip(pool._cache.store.layers, before, strict=True):
        assert torch.equal(layer[table], bytes_before)


def test_a_query_gets_no_beginning_of_sequence() -> None:
    pool = new_pool()
    ids = Characters()(QUERIES[0], add_special_tokens=False)["input_ids"]
    assert pool.document[0, 0] == 1
    assert pool.generate(QUERIES[0], **OPTIONS) == pool.generate(ids, **OPTIONS)
    assert pool.generate([1, *ids], **OPTIONS) != pool.generate(ids, **OPTIONS)


def test_the_summary_counts_the_bytes_that_exist() -> None:
    pool = new_pool(fmt="polykv")
    store, count = pool._cache.store, len(DOCUMENT) + 1
    summary = pool.memory_summary()
    assert (summary.tokens, summary.layers, summary.readers) == (count, 3, 0)
    assert summary.pool_bytes == summary.held_bytes == store._data.nbytes
    slot_bytes = store.fmt.slot_bytes(64)
    assert summary.pool_bytes == -(-count // 16) * 16 * 3 * 2 * slot_bytes
    assert summary.copy_16bit_bytes == count * 3 * 2 * 2 * 64 * 2
    assert summary.ratio == summary.copy_16bit_bytes / summary.pool_bytes


def test_the_summary_counts_readers_and_what_is_theirs_alone() -> None:
    pool = new_pool(fmt="polykv")
    store = pool._cache.store
    readers = [pool.attach(), pool.attach(rows=2)]
    assert pool.memory_summary().private_bytes == (0, 0)
    for reader in readers:
        rows = reader.batch_size
        pool._model(tokens(30, rows), past_key_values=reader)
    summary = pool.memory_summary()
    begun = (len(DOCUMENT) + 1) % 16  # its block is copied
    blocks = -(-(begun + 30) // 16)
    sizes = sorted(summary.private_bytes)
    assert sizes == [blocks * store.block_bytes, 2 * blocks * store.block_bytes]
    free = store.num_free * store.block_bytes
    total = summary.pool_bytes + sum(sizes) + free
    assert summary.held_bytes == store._data.nbytes == total
    assert summary.readers == 3
    assert summary.private_copies_16bit_bytes == 3 * summary.copy_16bit_bytes
    assert summary.private_copies_32bit_bytes == 6 * summary.copy_16bit_bytes
    assert "3 reader(s)" in str(summary) and f"{summary.ratio:.2f} x" in str(summary)
    del reader, readers
    assert pool.memory_summary().readers == 0


def test_texts_that_do_not_fit_are_named() -> None:
    model = tiny_model("llama")
    for document in ("x" * 512, []):
        with pytest.raises(UnsupportedError, match=r"the document would take \d+ tok"):
            SharedKVPool.from_document(model, Characters(), document)
    pool = new_pool()
    with pytest.raises(
        UnsupportedError, match=r"document, query and answer .* 1 to 512"
    ):
        pool.generate("?", max_new_tokens=300)
    with pytest.raises(UnsupportedError, match="query 1 has no token"):
        pool.generate_many(["?", ""])


def test_an_unknown_treatment_is_named() -> None:
    with pytest.raises(ValueError, match="no key treatment 'smooth'"):
        SharedKVPool.from_document(
            tiny_model("llama"), Characters(), DOCUMENT, key_treatment="smooth"
        )
