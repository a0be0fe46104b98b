# SPDX-License-Identifier: Apache-2.0
"""A document's cache that many agents read: built once, compressed, shared in place.

After PolyKV (arXiv 2604.24971), with three differences: the bits are really packed,
agents attend to the packed bytes instead of a copy each, and what they add is
compressed, too.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polykv_vllm.errors import UnsupportedError
from polykv_vllm.hf.attention import IMPLEMENTATION
from polykv_vllm.hf.blocks import BLOCK_SIZE
from polykv_vllm.hf.cache import PolyKVCache
from polykv_vllm.hf.treatment import AUTO

_MB = 1e6


@dataclass(frozen=True)
class MemorySummary:
    """Bytes of a pool and its readers; all of them are of tensors that exist, unless a
    name says "would".

    Attributes:
        fmt: Name of the format.
        tokens: Tokens of the document.
        layers: Attention layers.
        pool_bytes: Blocks of the document, the unused rows of the last one included.
        readers: Rows of all attached caches.
        private_bytes: Blocks that each attached cache holds alone.
        held_bytes: All of the store: document, readers, blocks in reserve.
        copy_16bit_bytes: One copy of the document in 16 bits would take.

    """

    fmt: str
    tokens: int
    layers: int
    pool_bytes: int
    readers: int
    private_bytes: tuple[int, ...]
    held_bytes: int
    copy_16bit_bytes: int

    @property
    def ratio(self) -> float:
        """A 16-bit copy of the document over what the pool takes."""
        return self.copy_16bit_bytes / self.pool_bytes

    @property
    def private_copies_16bit_bytes(self) -> int:
        """What a 16-bit copy of the document for each reader would take."""
        return self.readers * self.copy_16bit_bytes

    @property
    def private_copies_32bit_bytes(self) -> int:
        """The same in 32 bits: what the paper's tables compare with."""
        return 2 * self.private_copies_16bit_bytes

    def __str__(self) -> str:
        """Return a table."""
        lines = {
            f"document, {self.tokens} tokens in {self.fmt}": self.pool_bytes,
            f"{self.readers} reader(s), their own tokens": sum(self.private_bytes),
            "held in all, blocks in reserve included": self.held_bytes,
            "one 16-bit copy of the document": self.copy_16bit_bytes,
            "a 16-bit copy for each reader": self.private_copies_16bit_bytes,
            "a 32-bit copy each (the paper's baseline)": (
                self.private_copies_32bit_bytes
            ),
        }
        table = [f"{name:42}{size / _MB:10.2f} MB" for name, size in lines.items()]
        return "\n".join([*table, f"{'compression':42}{self.ratio:10.2f} x"])


class SharedKVPool:
    """The packed cache of one document. Make it with `from_document`.

    Readers may run in threads of their own, each with its own cache.

    Attributes:
        num_tokens: Tokens of the document.
        document: Its tokens, `[1, num_tokens]`.

    """

    def __init__(
        self, model: Any, tokenizer: Any, document: torch.Tensor, cache: PolyKVCache
    ) -> None:
        self._model, self._tokenizer, self._cache = model, tokenizer, cache
        self.document, self.num_tokens = document, document.shape[1]
        self._readers: weakref.WeakSet[PolyKVCache] = weakref.WeakSet()

    @classmethod
    def from_document(
        cls,
        model: Any,
        tokenizer: Any,
        document: str | Sequence[int],
        fmt: str = "polykv",
        *,
        key_treatment: str = AUTO,
        block_size: int = BLOCK_SIZE,
        chunk_tokens: int = 512,
    ) -> "SharedKVPool":
        """Compute and compress the cache of a document.

        Sets the model's attention implementation to "polykv", and leaves it there.

        Args:
            model: A causal language model of transformers, on the CPU.
            tokenizer: Its tokenizer.
            document: Text, or tokens with what the model wants at their beginning.
            fmt: Name of the format.
            key_treatment: As in `PolyKVCache.for_model`.
            block_size: Tokens per block, a multiple of 16.
            chunk_tokens: Tokens per forward pass; changes memory, not results.

        Raises:
            UnsupportedError: The model cannot be served, or the document is empty or
                longer than the model's positions.

        """
        ids = (
            tokenizer(document)["input_ids"] if isinstance(document, str) else document
        )
        tokens = torch.as_tensor(ids, dtype=torch.long).reshape(1, -1)
        _check_length(model, tokens.shape[1], "the document")
        cache = PolyKVCache.for_model(
            model, fmt, key_treatment=key_treatment, block_size=block_size
        )
        model.set_attn_implementation(IMPLEMENTATION)
        cache.store.reserve(-(-tokens.shape[1] // block_size))
        with torch.inference_mode():
            for chunk in tokens.split(chunk_tokens, dim=1):
                # Of the last layer's output nothing is needed: no logits are computed.
                model.base_model(chunk, past_key_values=cache, use_cache=True)
        return cls(model, tokenizer, tokens, cache)

    def attach(self, rows: int = 1) -> PolyKVCache:
        """Return a cache that begins with the document and goes on by itself.

        It shares the document's blocks and owns what is added. Rows are agents that
        run in one batch. When it is garbage, its blocks are free again.
        """
        reader = self._cache.fork(rows)
        self._readers.add(reader)
        return reader

    def generate(self, query: str | Sequence[int], **options: Any) -> str:
        """Answer one query about the document; see `generate_many`."""
        return self.generate_many([query], **options)[0]

    def generate_many(
        self, queries: Sequence[str | Sequence[int]], **options: Any
    ) -> list[str]:
        """Answer queries about the document, all of them in one batch.

        Args:
            queries: Texts that go on where the document ends (no special token is put
                before them), or their tokens.
            options: For `model.generate`; greedy and 64 new tokens by default.

        Returns:
            The answers, special tokens left out.

        Raises:
            UnsupportedError: A query is empty, or document, query and answer are longer
                than the model's positions.

        """
        options = {"do_sample": False, "max_new_tokens": 64} | options
        rows = [self._tokens(query) for query in queries]
        width = max(map(len, rows), default=0)
        if not all(rows):
            raise UnsupportedError(f"query {rows.index([])} has no token to go on from")
        total = self.num_tokens + width + options["max_new_tokens"]
        _check_length(self._model, total, "document, query and answer")
        tokens, mask = (
            torch.zeros(len(rows), width).long(),
            torch.zeros(len(rows), width),
        )
        for row, ids in enumerate(rows):
            tokens[row, width - len(ids) :] = torch.tensor(ids)
            mask[row, width - len(ids) :] = 1
        reader = self.attach(len(rows))
        reader.expect_padding(mask)
        shared = torch.ones(len(rows), self.num_tokens)
        output = self._model.generate(
            tokens,
            attention_mask=torch.cat([shared, mask], 1).long(),
            past_key_values=reader,
            pad_token_id=self._pad_token(),
            **options,
        )
        return list(
            self._tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
        )

    def memory_summary(self) -> MemorySummary:
        """Return what the document and the readers attached now take."""
        store = self._cache.store
        elements = 2 * store.num_layers * store.num_kv_heads * store.head_dim
        (table,) = self._cache.sequences.tables
        with store.lock:
            attached = list(self._readers)
            return MemorySummary(
                fmt=store.fmt.name,
                tokens=self.num_tokens,
                layers=store.num_layers,
                pool_bytes=len(table) * store.block_bytes,
                readers=sum(reader.batch_size for reader in attached),
                private_bytes=tuple(reader.private_bytes() for reader in attached),
                held_bytes=store.nbytes,
                copy_16bit_bytes=self.num_tokens * elements * 2,
            )

    def _tokens(self, query: str | Sequence[int]) -> list[int]:
        if isinstance(query, str):
            return list(self._tokenizer(query, add_special_tokens=False)["input_ids"])
        return list(query)

    def _pad_token(self) -> int:
        # Only fills what is masked or follows an end, where every token is as good.
        pad = self._tokenizer.pad_token_id
        return (self._tokenizer.eos_token_id or 0) if pad is None else pad


def _check_length(model: Any, length: int, what: str) -> None:
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if not length or (limit and length > limit):
        raise UnsupportedError(
            f"{what} would take {length} tokens; possible with this model: 1 to {limit}"
        )
