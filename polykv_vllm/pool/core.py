# SPDX-License-Identifier: Apache-2.0
"""What routes ask of the engine core, in whose process the cache is kept.

One method with plain values in and out, because they cross between processes. It runs
between two steps of the engine.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from polykv_vllm.config import parse_options
from polykv_vllm.formats import is_polykv_dtype
from polykv_vllm.pool import public
from polykv_vllm.pool.disk.connector import PolyKVPoolConnector
from polykv_vllm.pool.pins import (
    ATTRIBUTE,
    Limits,
    PinError,
    Prefix,
    PrefixPool,
    begins_with,
)

logger = init_logger("vllm.polykv")

REQUEST_NAME = "polykv-prefix-"
"""How the names of requests begin that compute a prefix."""


class CorePool:
    """The pool of one engine, as the methods of `EngineCore` see it.

    Args:
        core: vLLM's `EngineCore`.

    Raises:
        PinError: The engine has no cache that could be pinned.

    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._manager = core.scheduler.kv_cache_manager
        self._config = core.scheduler.vllm_config
        self._check()
        self.pool = PrefixPool(self._manager.block_pool, self._limits())
        if isinstance(core.scheduler.connector, PolyKVPoolConnector):
            core.scheduler.connector.bind_pins(self.pool)

    def define(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Name a prefix and say whether it could be pinned."""
        token_ids = argument["token_ids"]
        hashes = self._hashes(argument)
        if not hashes:
            raise PinError(
                f"{len(token_ids)} tokens fill no block: a block has "
                f"{self.pool.limits.block_size}, and only full ones can be found again",
                400,
            )
        self.pool.expire()
        self.pool.check_room(hashes)
        prefix = self.pool.define(
            argument["salt"], argument["name"], token_ids, hashes, argument["ttl_s"]
        )
        if argument.get("is_public") and prefix.salt is None:
            prefix.is_public = True
            public.add(token_ids, self.pool.limits.block_size)
        return self._describe(prefix)

    def pin(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Pin what the cache has of a prefix."""
        prefix = self.pool.get(argument["salt"], argument["name"])
        self.pool.pin(prefix)
        return self._describe(prefix)

    def unpin(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Unpin a prefix; its name stays."""
        prefix = self.pool.get(argument["salt"], argument["name"])
        self.pool.unpin(prefix, "unpinned on request")
        return self._describe(prefix)

    def remove(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Unpin a prefix and forget it."""
        prefix = self.pool.get(argument["salt"], argument["name"])
        self.pool.remove(prefix.salt, prefix.name)
        if prefix.is_public:
            public.remove(prefix.token_ids)
        return self._describe(prefix)

    def get(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Describe a prefix, its tokens included: only for whoever names its salt."""
        prefix = self.pool.get(argument["salt"], argument["name"])
        return self._describe(prefix) | {"token_ids": list(prefix.token_ids)}

    def list(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Describe the prefixes of one salt; of public ones only what they are.

        Who reads a public prefix, and how often, is not for other salts to know.
        """
        self.pool.expire()
        salt = argument["salt"]
        return {
            "prefixes": [
                self._describe(prefix) if prefix.salt == salt else _outline(prefix)
                for prefix in self._visible(salt)
            ]
        }

    def explain(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Say what a prompt would find in memory, and where it leaves each prefix."""
        token_ids = argument["token_ids"]
        hashes, size = self._hashes(argument), self.pool.limits.block_size
        num_hit = 0
        for block_hash in hashes[: (len(token_ids) - 1) // size]:
            if self._manager.block_pool.get_cached_block(block_hash, [0]) is None:
                break
            num_hit += size
        prefixes = [
            {
                "name": prefix.name,
                "tokens": len(prefix.token_ids),
                "common": _common(prefix, token_ids),
            }
            for prefix in self._visible(argument["salt"])
        ]
        return {
            "block_size": size,
            "hit_tokens": num_hit,
            "disk_tokens": self._num_on_disk(argument["salt"], token_ids, num_hit),
            "prefixes": prefixes,
        }

    def on_request(self, request: Any) -> None:
        """Take note of a request, unless the pool itself has sent it."""
        if not request.request_id.startswith(REQUEST_NAME):
            self.pool.on_request(request.block_hashes)

    def on_reset(self) -> None:
        """Let every pin go: the cache is about to be emptied."""
        if count := self.pool.unpin_all("the prefix cache was reset"):
            logger.warning(
                "Pool: %d prefixes are no longer pinned: the prefix cache was reset. "
                "Pin them again to have them computed anew",
                count,
            )

    def _visible(self, salt: str | None) -> Iterator[Prefix]:
        for prefix in self.pool.prefixes.values():
            if prefix.salt == salt or prefix.is_public:
                yield prefix

    def _describe(self, prefix: Prefix) -> dict[str, Any]:
        size = self.pool.limits.block_size
        readers = sum(
            begins_with(request.block_hashes, prefix)
            for request in self._scheduler.running
        )
        block_pool = self._manager.block_pool
        in_memory = all(block_pool.get_cached_block(h, [0]) for h in prefix.hashes)
        uncompressed = self._bytes_per_token_uncompressed()
        return {
            "name": prefix.name,
            "state": prefix.state,
            "public": prefix.is_public,
            "reason": prefix.lost,
            "tokens": len(prefix.token_ids),
            "pinned_tokens": len(prefix.held) * size,
            "physical_bytes": len(prefix.held) * self._block_bytes(),
            "logical_bytes": len(prefix.token_ids) * uncompressed * max(readers, 1),
            "readers": readers,
            "hits": prefix.hits,
            "age_s": round(self.pool.age_s(prefix), 1),
            "ttl_s": prefix.ttl_s,
            "expires_in_s": self.pool.seconds_left(prefix) if prefix.held else None,
            "tiers": [*["memory"] * in_memory, *["disk"] * self._is_on_disk(prefix)],
        }

    def _is_on_disk(self, prefix: Prefix) -> bool:
        num_tokens = len(prefix.hashes) * self.pool.limits.block_size
        found = self._num_on_disk(prefix.salt, prefix.token_ids[:num_tokens], 0)
        return found == num_tokens

    def _num_on_disk(
        self, salt: str | None, token_ids: Sequence[int], start: int
    ) -> int:
        connector = self._scheduler.connector
        if not isinstance(connector, PolyKVPoolConnector):
            return 0
        return connector.num_on_disk(salt, list(token_ids), start)

    def _hashes(self, argument: dict[str, Any]) -> Sequence[bytes]:
        """Return the hashes that a request with these tokens would have."""
        request = Request(
            REQUEST_NAME,
            list(argument["token_ids"]),
            SamplingParams(max_tokens=1),
            None,
            cache_salt=argument["salt"],
            block_hasher=self._core.request_block_hasher,
        )
        return request.block_hashes

    def _limits(self) -> Limits:
        options = parse_options(self._config.additional_config).pool
        size = self._scheduler.block_size
        longest = self._scheduler.max_model_len + self._scheduler.num_lookahead_tokens
        watermark = self._manager.watermark_blocks
        return Limits(
            usable=self._manager.block_pool.num_gpu_blocks - 1,
            reserve=-(-longest // size) + watermark,
            share=options.pinned_share,
            block_size=size,
        )

    def _check(self) -> None:
        reasons = []
        if not is_polykv_dtype(self._config.cache_config.cache_dtype):
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
        if self._config.parallel_config.data_parallel_size > 1:
            reasons.append(
                "there are several data parallel engines, each with a cache of its own"
            )
        if reasons:
            raise PinError(f"prefixes cannot be pinned: {'; '.join(reasons)}", 501)

    def _block_bytes(self) -> int:
        config = self._scheduler.kv_cache_config
        total = sum(tensor.size for tensor in config.kv_cache_tensors)
        world_size = self._config.parallel_config.world_size
        return int(total // config.num_blocks * world_size)

    def _bytes_per_token_uncompressed(self) -> int:
        from polykv_vllm.support import check_model

        model = self._config.model_config.hf_text_config
        support = check_model(model, self._config.cache_config.cache_dtype)
        return support.uncompressed_bytes_per_token()


_OPERATIONS = ("define", "pin", "unpin", "remove", "get", "list", "explain")


def call(core: Any, operation: str, argument: dict[str, Any]) -> dict[str, Any]:
    """Do what a route asks for.

    Args:
        core: vLLM's `EngineCore`.
        operation: A public method of `CorePool` that takes a mapping.
        argument: What it needs, `salt` always.

    Returns:
        Its answer, or {"error": message, "status": HTTP status}: an exception would
        reach the other process without its type.

    """
    try:
        if operation not in _OPERATIONS:
            possible = ", ".join(_OPERATIONS)
            raise PinError(f"{operation!r} is none of {possible}", 400)
        answer = getattr(of_scheduler(core), operation)(argument)
        return dict(answer)
    except PinError as error:
        return {"error": str(error), "status": error.status}


def of_scheduler(core: Any) -> CorePool:
    """Return the pool of an engine, made when it is first asked for."""
    pool = getattr(core.scheduler, ATTRIBUTE, None)
    if pool is None:
        pool = CorePool(core)
        setattr(core.scheduler, ATTRIBUTE, pool)
    return pool


def _outline(prefix: Prefix) -> dict[str, Any]:
    return {
        "name": prefix.name,
        "state": prefix.state,
        "public": True,
        "tokens": len(prefix.token_ids),
    }


def _common(prefix: Prefix, token_ids: Sequence[int]) -> int:
    """Count the tokens that a prompt has in common with a prefix, from the first on."""
    pairs = zip(prefix.token_ids, token_ids, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b),
        min(len(prefix.token_ids), len(token_ids)),
    )
