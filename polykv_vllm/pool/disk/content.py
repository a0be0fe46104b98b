# SPDX-License-Identifier: Apache-2.0
"""Names of blocks by what was read to compute them: tokens, adapter, salt.

The name of a block covers the name of the one before it, so equal names mean equal
tokens from the first one on. vLLM's own hashes are not used: they know an adapter by
its name and path, and their first link depends on the process's environment.
"""

import array
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from polykv_vllm.pool.disk.fields import Value, digest


@dataclass(frozen=True)
class Context:
    """What makes the same tokens another content.

    Attributes:
        salt: The request's `cache_salt`; None without one.
        lora: Name of the adapter and digest of its files; None without one.
        num_public_blocks: Blocks at the start that are shared by every salt.

    """

    salt: str | None = None
    lora: tuple[str, str] | None = None
    num_public_blocks: int = 0

    def fields(self, index: int) -> dict[str, Value]:
        """Return what enters the name of a block beside tokens and parent."""
        found: dict[str, Value] = {}
        if index == 0:
            found |= {"lora": self.lora, "salt": None}
        if index == self.num_public_blocks and self.salt is not None:
            found["salt"] = self.salt
        return found


@dataclass
class ContentNames:
    """The names of a request's full blocks, computed as they are asked for.

    Attributes:
        context: What the request has beside its tokens.
        block_size: Tokens per block.

    """

    context: Context
    block_size: int
    _names: list[bytes] = field(default_factory=list)

    def names(self, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """Return the names of the first blocks.

        Args:
            token_ids: The request's; those of earlier calls have not changed.
            num_blocks: How many; so many blocks are full.

        """
        while len(self._names) < num_blocks:
            start = len(self._names) * self.block_size
            tokens = token_ids[start : start + self.block_size]
            if len(tokens) < self.block_size:
                raise ValueError(f"block {len(self._names)} is not full")
            self._names.append(self._next(tokens))
        return self._names[:num_blocks]

    def _next(self, tokens: Sequence[int]) -> bytes:
        words = array.array("I", tokens)
        if sys.byteorder == "big":
            words.byteswap()
        index = len(self._names)
        parent = self._names[-1] if index else None
        fields: dict[str, Value] = {"parent": parent, "tokens": words.tobytes()}
        return digest("block", fields | self.context.fields(index))
