# SPDX-License-Identifier: Apache-2.0
"""Salts and public prefixes, in vLLM's hashes and in the names of blocks on disk."""

from collections.abc import Iterator
from typing import Any

import pytest

from polykv_vllm.pool import public
from polykv_vllm.pool.disk.content import ContentNames, Context
from polykv_vllm.seams import cache_salt

BLOCK = 32
PUBLIC = list(range(100))  # three whole blocks
PROMPT = [*PUBLIC, *range(200, 300)]


@pytest.fixture(autouse=True)
def seam() -> Iterator[None]:
    change = cache_salt.SEAM.change
    was_installed = change.is_installed()
    change.install()
    yield
    if not was_installed:
        change.uninstall()


@pytest.fixture
def declared() -> Iterator[None]:
    public.add(PUBLIC, BLOCK)
    yield
    public.remove(PUBLIC)


def hashes(salt: str | None, prompt: list[int] = PROMPT) -> list[bytes]:
    """Return vLLM's hashes of a request, with the seam as every process has it."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    sampling = SamplingParams(max_tokens=1)
    request = Request("r", prompt, sampling, None, cache_salt=salt, block_hasher=hasher)
    return list(request.block_hashes)


def names(salt: str | None, prompt: list[int] = PROMPT) -> list[bytes]:
    num_public = public.longest_common(prompt) // BLOCK if salt else 0
    context = Context(salt, None, num_public)
    return ContentNames(context, BLOCK).names(prompt, len(prompt) // BLOCK)


@pytest.mark.parametrize("of", [hashes, names])
def test_a_public_prefix_is_shared_and_nothing_else(of: Any, declared: None) -> None:
    nobody, a, b = of(None), of("a"), of("b")
    assert nobody[:3] == a[:3] == b[:3]
    for index in range(3, len(nobody)):
        assert len({nobody[index], a[index], b[index]}) == 3


@pytest.mark.parametrize("of", [hashes, names])
def test_leaving_a_public_prefix_early(of: Any, declared: None) -> None:
    early = [*PUBLIC[:40], *range(300, 400)]
    a, b = of("a", early), of("b", early)
    assert a[0] == b[0] == of(None)[0]
    assert not set(a[1:]) & set(b)
    other = [7, *PROMPT[1:]]
    assert not set(of("a", other)) & set(of("b", other))


@pytest.mark.parametrize("of", [hashes, names])
def test_without_a_public_prefix_salts_share_nothing(of: Any) -> None:
    assert not set(of("a")) & set(of("b"))
    assert not set(of("a")) & set(of(None))


def test_a_request_keeps_its_hashes_when_a_prefix_becomes_public() -> None:
    class Request:
        cache_salt = "a"
        all_token_ids = PROMPT

    request = Request()
    assert public.num_public_tokens(request) == 0
    public.add(PUBLIC, BLOCK)
    try:
        assert public.num_public_tokens(request) == 0
        assert public.num_public_tokens(Request()) == 96
    finally:
        public.remove(PUBLIC)
    assert public.num_public_tokens(Request()) == 0
