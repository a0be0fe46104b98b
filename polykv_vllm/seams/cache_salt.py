# SPDX-License-Identifier: Apache-2.0
"""Lets salted requests share a public prefix (`pool/public.py`).

vLLM puts a request's salt into the hash of its first block. For a request that begins
with a public prefix it goes into the block after that. Without public prefixes, and
for requests without a salt, vLLM's answer is returned as it is. Of the modules that
have imported the function by value, the block pool uses it for KV events alone, which
then name the salt with the first block.
"""

from collections.abc import Callable
from typing import Any

from polykv_vllm.pool import public
from polykv_vllm.seams.seam import Seam, Wrap

_TARGET = "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys"
_KEY = "cache_salt"


def _move_salt(original: Callable[..., Any]) -> Callable[..., Any]:
    def generate_block_hash_extra_keys(
        request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
    ) -> Any:
        keys, next_mm_idx = original(
            request, start_token_idx, end_token_idx, start_mm_idx
        )
        shared = public.num_public_tokens(request)
        if shared == 0 or start_token_idx not in (0, shared):
            return keys, next_mm_idx
        others = tuple(key for key in keys or () if key[0] != _KEY)
        salt = () if start_token_idx == 0 else ((_KEY, request.cache_salt),)
        return (*others, *salt) or None, next_mm_idx

    return generate_block_hash_extra_keys


SEAM = Seam(
    name="cache_salt",
    target=_TARGET,
    why="a salt keeps even a public system prompt apart for every tenant",
    upstream="vllm#52655",
    expected=("d3ad5bc87f295bf2",),
    remove_when="vLLM has public prefixes below salted suffixes",
    is_obsolete=lambda: False,
    change=Wrap("cache_salt", _TARGET, _move_salt),
)
