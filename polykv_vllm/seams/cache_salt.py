# SPDX-License-Identifier: Apache-2.0
"""Lets salted requests share a public prefix, and tells apart reloaded adapters.

vLLM puts a request's salt into the hash of its first block. For a request that begins
with a public prefix (`pool/public.py`) it goes into the block after that. An adapter is
in the hash by its name and path; with the pool on disk the digest of its files is, too
(`pool/adapters.py`). Without either, vLLM's answer is returned as it is. Of the modules
that have imported the function by value, the block pool uses it for KV events alone,
which then name the salt with the first block.
"""

from collections.abc import Callable
from typing import Any

from polykv_vllm.pool import adapters, public
from polykv_vllm.seams.seam import Seam, Wrap

_TARGET = "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys"
_SALT = "cache_salt"
_ADAPTER = "lora"


def _move_salt(original: Callable[..., Any]) -> Callable[..., Any]:
    def generate_block_hash_extra_keys(
        request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
    ) -> Any:
        keys, next_mm_idx = original(
            request, start_token_idx, end_token_idx, start_mm_idx
        )
        if (digest := adapters.key_part(request)) is not None:
            # At the end: events name an adapter by what comes first.
            keys = tuple((*k, digest) if k[0] == _ADAPTER else k for k in keys)
        shared = public.num_public_tokens(request)
        if shared == 0 or start_token_idx not in (0, shared):
            return keys, next_mm_idx
        others = tuple(key for key in keys or () if key[0] != _SALT)
        salt = () if start_token_idx == 0 else ((_SALT, request.cache_salt),)
        return (*others, *salt) or None, next_mm_idx

    return generate_block_hash_extra_keys


SEAM = Seam(
    name="cache_salt",
    target=_TARGET,
    why="a salt keeps even a public system prompt apart for every tenant, and an "
    "adapter that is loaded again finds what other weights have computed",
    upstream="vllm#52655",
    expected=("d3ad5bc87f295bf2",),
    remove_when="vLLM has public prefixes below salted suffixes, and the digest of "
    "an adapter's files in its key",
    is_obsolete=lambda: False,
    change=Wrap("cache_salt", _TARGET, _move_salt),
)
