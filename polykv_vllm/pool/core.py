# SPDX-License-Identifier: Apache-2.0
"""What routes ask of the engine core, in whose process the cache is kept.

One method with plain values in and out, because they cross between processes. It runs
between two steps of the engine.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from vllm.logger import init_logger

from polykv_vllm.metrics.pins_file import PinFigures, PinRecorder
from polykv_vllm.pool import public
from polykv_vllm.pool.engine_cache import REQUEST_NAME, EngineCache
from polykv_vllm.pool.kept import UNPINNED, KeptNames
from polykv_vllm.pool.pins import ATTRIBUTE, PinError, Prefix, PrefixPool
from polykv_vllm.pool.tree import nest

logger = init_logger("vllm.polykv")


class CorePool:
    """The pool of one engine, as the methods of `EngineCore` see it.

    Args:
        core: vLLM's `EngineCore`.

    Raises:
        PinError: The engine has no cache that could be pinned.

    """

    def __init__(self, core: Any) -> None:
        self._cache = EngineCache(core)
        self.pool = PrefixPool(self._cache.block_pool, self._cache.limits)
        self._cache.bind_pins(self.pool)
        parallel = self._cache.config.parallel_config
        self._recorder = PinRecorder(parallel.data_parallel_index)
        self._recorded = -1
        self._kept = KeptNames(self._cache, self.pool)
        self._kept.restore()
        self._record()

    def define(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Name a prefix and say whether it could be pinned.

        The name of a file at start is the file's: `is_from_file` forgets another one.
        """
        salt, name = argument["salt"], argument["name"]
        token_ids = argument["token_ids"]
        hashes = self._cache.hashes(salt, token_ids)
        if not hashes:
            raise PinError(
                f"{len(token_ids)} tokens fill no block: a block has "
                f"{self.pool.limits.block_size}, and only full ones can be found again",
                400,
            )
        self.pool.expire()
        self.pool.check_room(salt, hashes)
        before = self.pool.prefixes.get((salt, name))
        prefix = self.pool.define(salt, name, token_ids, hashes, argument["ttl_s"])
        if before is not None and before is not prefix:
            self._make_private(before)
        if argument["is_public"]:
            prefix.is_public = True
            public.add(token_ids, self.pool.limits.block_size)
        if argument["is_from_file"]:
            prefix.is_kept = False
            self._kept.forget(salt, name)
        elif prefix is not before:
            prefix.is_kept = True
        return self._describe(prefix)

    def pin(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Pin what the cache has of a prefix."""
        prefix = self.pool.get(argument["salt"], argument["name"])
        # They may be others now: a prefix that this one begins with became public.
        prefix.hashes = self._cache.hashes(prefix.salt, prefix.token_ids)
        self.pool.pin(prefix)
        self._kept.save(prefix, is_pinned=True)
        return self._describe(prefix)

    def unpin(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Unpin a prefix; its name stays."""
        prefix = self.pool.get(argument["salt"], argument["name"])
        self.pool.unpin(prefix, UNPINNED)
        self._kept.save(prefix, is_pinned=False)
        return self._describe(prefix)

    def remove(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Unpin a prefix and forget it."""
        prefix = self.pool.get(argument["salt"], argument["name"])
        self.pool.remove(prefix.salt, prefix.name)
        self._kept.forget(prefix.salt, prefix.name)
        self._make_private(prefix)
        return self._describe(prefix)

    def restored(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Return whose prefixes were pinned before a restart; for no route."""
        return {"keys": [(prefix.salt, prefix.name) for prefix in self._kept.waiting()]}

    def get(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Describe a prefix, its tokens included: only for whoever names its salt."""
        prefix = self.pool.get(argument["salt"], argument["name"])
        return self._describe(prefix) | {"token_ids": list(prefix.token_ids)}

    def list(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Describe the prefixes of one salt; of public ones only what they are.

        Who reads a public prefix, and how often, is not for other salts to know, nor
        is what others pin.
        """
        self.pool.expire()
        salt = argument["salt"]
        found = list(self._visible(salt))
        size = self.pool.limits.block_size
        return {
            "prefixes": [
                self._describe(prefix) if prefix.salt == salt else _outline(prefix)
                for prefix in found
            ],
            "tree": [
                {
                    "tokens": node.num_blocks * size,
                    "parent": node.parent,
                    "prefix": node.prefix,
                }
                for node in nest([prefix.hashes for prefix in found])
            ],
            "cache": self._fill(salt),
        }

    def explain(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Say what a prompt would find in memory, and where it leaves each prefix."""
        token_ids = argument["token_ids"]
        salt, size = argument["salt"], self.pool.limits.block_size
        hashes = self._cache.hashes(salt, token_ids)
        # The last token of a prompt is always computed.
        usable = hashes[: (len(token_ids) - 1) // size]
        num_hit = self._cache.num_in_memory(usable) * size
        prefixes = [
            {
                "name": prefix.name,
                "tokens": len(prefix.token_ids),
                "common": _common(prefix, token_ids),
            }
            for prefix in self._visible(salt)
        ]
        return {
            "block_size": size,
            "hit_tokens": num_hit,
            "disk_tokens": self._cache.num_tokens_on_disk(salt, token_ids, num_hit),
            "prefixes": prefixes,
        }

    def on_request(self, request: Any) -> None:
        """Take note of a request, unless the pool itself has sent it."""
        if not request.request_id.startswith(REQUEST_NAME):
            self._kept.note_hits(self.pool.on_request(request.block_hashes))
            self._record()

    def do(self, operation: str, argument: dict[str, Any]) -> dict[str, Any]:
        """Do what a route asks for; the metrics then show it.

        Raises:
            PinError: It cannot be done.

        """
        if operation not in _OPERATIONS:
            possible = ", ".join(_OPERATIONS)
            raise PinError(f"{operation!r} is none of {possible}", 400)
        try:
            return dict(getattr(self, operation)(argument))
        finally:
            self._record()

    def on_reset(self) -> None:
        """Let every pin go: the cache is about to be emptied."""
        if count := self.pool.unpin_all("the prefix cache was reset"):
            logger.warning(
                "Pool: %d prefixes are no longer pinned: the prefix cache was reset. "
                "Pin them again to have them computed anew",
                count,
            )
        self._record()

    def _record(self) -> None:
        """Show on `/metrics` what is pinned, if that has changed."""
        if self.pool.version == self._recorded:
            return
        self._recorded = self.pool.version
        block_bytes = self._cache.block_bytes
        prefixes = self.pool.prefixes.values()
        self._recorder.record(
            PinFigures(
                pinned_bytes=self.pool.num_pinned * block_bytes,
                pin_cap_bytes=self.pool.limits.cap * block_bytes,
                pinned_prefixes=sum(bool(prefix.held) for prefix in prefixes),
            )
        )

    def _fill(self, salt: str | None) -> dict[str, Any]:
        """Say how full the cache is; to a caller with a salt, of its own pins only."""
        pool, block_bytes = self.pool, self._cache.block_bytes
        found = {
            "capacity_bytes": pool.limits.usable * block_bytes,
            "pin_cap_bytes": pool.limits.cap * block_bytes,
            "pinned_bytes": pool.num_pinned_by(salt) * block_bytes,
        }
        if salt is None:
            found["total_pinned_bytes"] = pool.num_pinned * block_bytes
            found["used_share"] = round(self._cache.block_pool.get_usage(), 4)
        return found

    def _visible(self, salt: str | None) -> Iterator[Prefix]:
        for prefix in self.pool.prefixes.values():
            if prefix.salt == salt or prefix.is_public:
                yield prefix

    def _describe(self, prefix: Prefix) -> dict[str, Any]:
        size = self.pool.limits.block_size
        readers = self._cache.num_readers(prefix)
        uncompressed = self._cache.uncompressed_bytes_per_token
        return {
            "name": prefix.name,
            "state": prefix.state,
            "public": prefix.is_public,
            "reason": prefix.lost,
            "tokens": len(prefix.token_ids),
            "pinned_tokens": len(prefix.held) * size,
            "physical_bytes": len(prefix.held) * self._cache.block_bytes,
            "logical_bytes": len(prefix.token_ids) * uncompressed * max(readers, 1),
            "readers": readers,
            "hits": prefix.hits,
            "age_s": round(self.pool.age_s(prefix), 1),
            "ttl_s": prefix.ttl_s,
            "expires_in_s": self.pool.seconds_left(prefix) if prefix.held else None,
            "tiers": self._cache.tiers(prefix),
        }

    def _make_private(self, prefix: Prefix) -> None:
        if prefix.is_public:
            public.remove(prefix.token_ids)


_OPERATIONS = (
    *("define", "pin", "unpin", "remove", "restored"),
    *("get", "list", "explain"),
)


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
        return of_scheduler(core).do(operation, argument)
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
