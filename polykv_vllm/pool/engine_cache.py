# SPDX-License-Identifier: Apache-2.0
"""What the pool needs to know of an engine: its cache, its requests, its disk."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from polykv_vllm.config import parse_options
from polykv_vllm.formats import is_polykv_dtype
from polykv_vllm.pool.disk.connector import PolyKVPoolConnector
from polykv_vllm.pool.pins import Limits, PinError, Prefix, PrefixPool, begins_with

REQUEST_NAME = "polykv-prefix-"
"""How the names of requests begin that compute a prefix."""


class EngineCache:
    """The cache of one engine.

    Attributes:
        block_pool: vLLM's `BlockPool`.
        config: vLLM's `VllmConfig`.

    Args:
        core: vLLM's `EngineCore`.

    Raises:
        PinError: The engine has no cache that could be pinned.

    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._manager = core.scheduler.kv_cache_manager
        self.block_pool = self._manager.block_pool
        self.config = core.scheduler.vllm_config
        self._check()

    @cached_property
    def limits(self) -> Limits:
        """What may be pinned."""
        options = parse_options(self.config.additional_config).pool
        size = self._scheduler.block_size
        longest = self._scheduler.max_model_len + self._scheduler.num_lookahead_tokens
        watermark = self._manager.watermark_blocks
        return Limits(
            usable=self.block_pool.num_gpu_blocks - 1,
            reserve=-(-longest // size) + watermark,
            share=options.pinned_share,
            block_size=size,
        )

    @cached_property
    def block_bytes(self) -> int:
        """Compressed bytes of one block, all layers and workers."""
        config = self._scheduler.kv_cache_config
        total = sum(tensor.size for tensor in config.kv_cache_tensors)
        world_size = self.config.parallel_config.world_size
        return int(total // config.num_blocks * world_size)

    @cached_property
    def uncompressed_bytes_per_token(self) -> int:
        """Bytes of one token in 16 bits, all layers and workers."""
        from polykv_vllm.support import check_model

        model = self.config.model_config.hf_text_config
        support = check_model(model, self.config.cache_config.cache_dtype)
        return support.uncompressed_bytes_per_token()

    @property
    def names_directory(self) -> Path | None:
        """Where the names of prefixes are kept; None: nowhere."""
        connector = self._connector
        return None if connector is None else connector.names_directory

    def bind_pins(self, pins: PrefixPool) -> None:
        """Have pinned blocks stay on disk."""
        if (connector := self._connector) is not None:
            connector.bind_pins(pins)

    def is_usable(self, token_ids: Sequence[int]) -> bool:
        """Whether a request may have these tokens and one more."""
        vocabulary = self.config.model_config.get_vocab_size()
        fits = len(token_ids) < self._scheduler.max_model_len
        return fits and all(0 <= token < vocabulary for token in token_ids)

    def hashes(self, salt: str | None, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """Return the hashes that a request with these tokens would have."""
        request = Request(
            REQUEST_NAME,
            list(token_ids),
            SamplingParams(max_tokens=1),
            None,
            cache_salt=salt,
            block_hasher=self._core.request_block_hasher,
        )
        return tuple(request.block_hashes)

    def num_readers(self, prefix: Prefix) -> int:
        """Count the running requests that begin with a prefix."""
        running = self._scheduler.running
        return sum(begins_with(request.block_hashes, prefix) for request in running)

    def num_in_memory(self, hashes: Sequence[bytes]) -> int:
        """Count the blocks in memory, up to the first one that is not."""
        for count, block_hash in enumerate(hashes):
            if self.block_pool.get_cached_block(block_hash, [0]) is None:
                return count
        return len(hashes)

    def num_tokens_on_disk(
        self, salt: str | None, token_ids: Sequence[int], start: int = 0
    ) -> int:
        """Count the tokens that a prompt would find on disk from a place on."""
        connector = self._connector
        if connector is None:
            return 0
        return connector.num_on_disk(salt, list(token_ids), start)

    def tiers(self, prefix: Prefix) -> list[str]:
        """Return where all full blocks of a prefix are."""
        in_memory = self.num_in_memory(prefix.hashes) == len(prefix.hashes)
        num_tokens = len(prefix.hashes) * self.limits.block_size
        found = self.num_tokens_on_disk(prefix.salt, prefix.token_ids[:num_tokens])
        return [*["memory"] * in_memory, *["disk"] * (found == num_tokens)]

    @property
    def _connector(self) -> PolyKVPoolConnector | None:
        found = self._scheduler.connector
        return found if isinstance(found, PolyKVPoolConnector) else None

    def _check(self) -> None:
        reasons = []
        if not is_polykv_dtype(self.config.cache_config.cache_dtype):
            reasons.append("--kv-cache-dtype is not one of polykv's")
        if not self._manager.enable_caching:
            reasons.append("prefix caching is off")
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        specs = [group.kv_cache_spec for group in groups]
        if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
            reasons.append(
                "the model has layers with sliding windows, of which vLLM keeps only "
                "the last blocks"
            )
        if self.config.parallel_config.data_parallel_size > 1:
            reasons.append(
                "there are several data parallel engines, each with a cache of its own"
            )
        if reasons:
            raise PinError(f"prefixes cannot be pinned: {'; '.join(reasons)}", 501)
