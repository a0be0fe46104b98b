# SPDX-License-Identifier: Apache-2.0
"""Keeps the names that were given at run time, and gives them again after a restart.

What cannot be written is logged, and serving goes on: the name then lasts as long as
the server. Pins are not made here: what they need has to be read or computed first.
"""

import time
from collections.abc import Iterable

from vllm.logger import init_logger

from polykv_vllm.pool.disk.names import NamesDirectory, StoredPrefix
from polykv_vllm.pool.engine_cache import EngineCache
from polykv_vllm.pool.pins import EXPIRED, PinError, Prefix, PrefixPool

logger = init_logger("vllm.polykv")

RESTARTED = "the server was started again"
UNPINNED = "unpinned on request"

_TOUCHES = 20  # of the file in each time to live, so that a restart is right by 5 %
_LEAST_S = 1.0


class KeptNames:
    """The names of one engine that outlive it, if it keeps anything on disk.

    Args:
        cache: The engine's.
        pool: Its prefixes.

    """

    def __init__(self, cache: EngineCache, pool: PrefixPool) -> None:
        self._cache = cache
        self._pool = pool
        path = cache.names_directory
        self._names = None if path is None else NamesDirectory(path)
        self._touched_s: dict[tuple[str | None, str], float] = {}

    def restore(self) -> None:
        """Name what was named before the restart; none of it is pinned yet."""
        stored = [] if self._names is None else self._names.load()
        for prefix in stored:
            try:
                self._restore(prefix)
            except PinError as error:
                logger.warning("Pool: prefix %s is not known: %s", prefix.name, error)
        if stored:
            logger.info("Pool: %d prefixes were named before", len(stored))

    def save(self, prefix: Prefix, is_pinned: bool) -> None:
        """Keep a name, and whether its prefix is to be pinned after a restart."""
        if self._names is None or not prefix.is_kept:
            return
        stored = StoredPrefix(
            prefix.name,
            prefix.salt,
            prefix.token_ids,
            prefix.ttl_s,
            time.time() - self._pool.age_s(prefix),
            is_pinned,
        )
        try:
            self._names.save(stored)
        except OSError as error:
            logger.error(
                "Pool: the name %s is known until the server ends, because it cannot "
                "be written: %s",
                prefix.name,
                error,
            )

    def forget(self, salt: str | None, name: str) -> None:
        """Keep a name no longer."""
        self._touched_s.pop((salt, name), None)
        if self._names is None:
            return
        try:
            self._names.remove(salt, name)
        except OSError as error:
            logger.error("Pool: a restart may know the name %s: %s", name, error)

    def note_hits(self, prefixes: Iterable[Prefix]) -> None:
        """Write down that prefixes were hit, where that keeps a pin."""
        for prefix in prefixes:
            if self._names is None or prefix.ttl_s is None or not prefix.is_kept:
                continue
            key, now = (prefix.salt, prefix.name), time.monotonic()
            every = max(prefix.ttl_s / _TOUCHES, _LEAST_S)
            if now - self._touched_s.get(key, -every) >= every:
                self._touched_s[key] = now
                self._names.touch(*key)

    def waiting(self) -> list[Prefix]:
        """Return what was pinned before the restart, and is to be again."""
        return [p for p in self._pool.prefixes.values() if p.lost == RESTARTED]

    def _restore(self, stored: StoredPrefix) -> None:
        if not self._cache.is_usable(stored.token_ids):
            raise PinError("the model has other tokens, or takes fewer of them", 400)
        hashes = self._cache.hashes(stored.salt, stored.token_ids)
        if not hashes:
            raise PinError("it fills no block", 400)
        prefix = self._pool.define(
            stored.salt, stored.name, stored.token_ids, hashes, stored.ttl_s
        )
        prefix.is_kept = True
        now = time.time()
        idle_s = now - stored.used_s
        reason = RESTARTED if stored.is_pinned else UNPINNED
        if stored.ttl_s is not None and idle_s >= stored.ttl_s:
            reason = EXPIRED
        self._pool.restore(prefix, now - stored.created_s, idle_s, reason)
