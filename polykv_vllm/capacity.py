# SPDX-License-Identifier: Apache-2.0
"""How many tokens a cache holds, from a model's config alone."""

from typing import Any

DEFAULT_BLOCK_SIZE = 128
"""Tokens of a block where none is asked for: vLLM's default on the CPU."""


def capacity_tokens(
    memory_bytes: int, token_bytes: int, block_size: int = DEFAULT_BLOCK_SIZE
) -> int:
    """Return the tokens that fit, in whole blocks, as vLLM allocates them.

    Exact when every layer keeps every token. With sliding-window layers it is a lower
    bound: vLLM takes their blocks back once they have left the window.

    Args:
        memory_bytes: Size of the cache.
        token_bytes: Bytes of one token in all layers.
        block_size: Tokens of a block.

    """
    return memory_bytes // (block_size * token_bytes) * block_size


def load_config(model: str) -> Any:
    """Return the transformers config of `model`, a directory or a hub name.

    Raises:
        OSError: There is no such model, or its config cannot be read.
        ValueError: The config names a model type that transformers does not know.

    """
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model)
