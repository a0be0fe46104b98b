# SPDX-License-Identifier: Apache-2.0
"""Prefixes that an operator has declared public: shared by requests of every salt.

A `cache_salt` keeps a request's blocks apart from those of other salts, because vLLM
hashes it into the first block. For a request that begins with a public prefix it goes
into the first block that is not the prefix's instead: what lies before is shared, what
follows is as private as it was. Only whole blocks count, so a prompt that leaves a
public prefix shares what it has of it.
"""

from collections.abc import Sequence
from typing import Any

_ATTRIBUTE = "_polykv_public_tokens"

_prefixes: tuple[tuple[tuple[int, ...], int], ...] = ()  # replaced, never changed


def add(token_ids: Sequence[int], block_size: int) -> None:
    """Declare a prefix public for requests that come from now on."""
    global _prefixes
    remove(token_ids)
    _prefixes = (*_prefixes, (tuple(token_ids), block_size))


def remove(token_ids: Sequence[int]) -> None:
    """Take that back; requests that are there keep what they have."""
    global _prefixes
    gone = tuple(token_ids)
    _prefixes = tuple(known for known in _prefixes if known[0] != gone)


def num_public_tokens(request: Any) -> int:
    """Count the tokens at a request's start whose blocks are public.

    Args:
        request: vLLM's. The answer to the first call is kept with it: the hashes of a
            request's blocks must not change while it runs.

    """
    if not request.cache_salt:
        return 0
    known = getattr(request, _ATTRIBUTE, None)
    if known is None:
        known = longest_common(request.all_token_ids)
        setattr(request, _ATTRIBUTE, known)
    return int(known)


def longest_common(token_ids: Sequence[int]) -> int:
    """Count the tokens, in whole blocks, that a prompt has in common with one."""
    return max((_common(token_ids, *known) for known in _prefixes), default=0)


def _common(token_ids: Sequence[int], prefix: tuple[int, ...], block_size: int) -> int:
    count = 0
    while count + block_size <= min(len(prefix), len(token_ids)):
        end = count + block_size
        if tuple(token_ids[count:end]) != prefix[count:end]:
            break
        count = end
    return count
