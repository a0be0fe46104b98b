# SPDX-License-Identifier: Apache-2.0
"""Named prefixes and their pins: blocks that vLLM's prefix cache may not let go.

A pin is one more reader of a block. vLLM counts readers and takes only blocks without
one for other requests, so nothing else has to change. What pins may hold is capped,
and the cap always leaves a request of `max_model_len` enough: else it would wait for
ever.

Nothing here runs on its own: pins that are out of time are let go when a request
arrives or someone asks.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from polykv_vllm.errors import PolyKVError

Key = tuple[str | None, str]
"""The salt of the caller, and the name."""

ATTRIBUTE = "_polykv_pool"
"""Where a scheduler keeps the pool of its engine."""

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""What a prefix may be called."""

MAX_TTL_S = 10 * 365 * 86400.0

EXPIRED = "its time to live is over"
"""Why a prefix lost its pin, see `Prefix.lost`."""

MAX_NAMES = 1000
"""Prefixes of one salt; each keeps its tokens in memory, pinned or not."""


class PinError(PolyKVError):
    """A prefix cannot be pinned, or there is none of that name.

    Attributes:
        status: The HTTP status that says so.

    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Prefix:
    """A named prefix.

    Attributes:
        name: Unique for its salt.
        salt: The `cache_salt` of whoever may use it; None for requests without one.
        token_ids: All of them; those of the last block may not fill it.
        hashes: vLLM's hash of each full block.
        ttl_s: Seconds that a pin lasts after it was made or last hit; None: for ever.
        created_s: When it was named, in seconds of the pool's clock.
        used_s: When it was pinned or hit last.
        hits: Requests that began with all of its full blocks.
        held: The pinned blocks, the first ones of the prefix.
        lost: Why it is not pinned any more, or "".
        is_public: Whether requests of every salt share it.
        is_kept: Whether a restart knows it again; those of a file at start are in it.

    """

    name: str
    salt: str | None
    token_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    ttl_s: float | None
    created_s: float
    used_s: float
    hits: int = 0
    held: list[Any] = field(default_factory=list)
    lost: str = ""
    is_public: bool = False
    is_kept: bool = False

    @property
    def state(self) -> str:
        """Whether all, some or none of its full blocks are pinned."""
        if not self.held:
            return "unpinned"
        return "pinned" if len(self.held) == len(self.hashes) else "partial"


@dataclass(frozen=True)
class Limits:
    """What pins may hold, in blocks.

    Attributes:
        usable: Blocks of the cache, vLLM's null block left out.
        reserve: What one request of `max_model_len` needs.
        share: The part of the cache that pins may hold at most.
        block_size: Tokens per block.

    """

    usable: int
    reserve: int
    share: float
    block_size: int

    @property
    def cap(self) -> int:
        """Blocks that may be pinned."""
        return max(min(int(self.usable * self.share), self.usable - self.reserve), 0)

    def refusal(self, wanted: int, pinned: int, by_salt: int | None) -> str:
        """Explain why so many blocks more cannot be pinned.

        Args:
            wanted: So many.
            pinned: Those that are pinned.
            by_salt: Those of them that the caller's salt has pinned, and no other
                number is told: what others have is not for it to know. None for a
                caller without a salt.

        """
        tokens = self.block_size
        cap = f"at most {self.cap} blocks ({self.cap * tokens} tokens)"
        if by_salt is None:
            why = f"{pinned} of {cap} are pinned"
        else:
            why = f"of {cap}, {by_salt} are pinned by this salt, and others pin as well"
        return (
            f"pinning {wanted} blocks ({wanted * tokens} tokens) more is not possible: "
            f"{why}. The cache has {self.usable}; pins may hold {self.share:.0%} of "
            f"it (pool.pinned_share) and must leave {self.reserve} for one request of "
            "max_model_len. Unpin something, enlarge the cache, or lower "
            "--max-model-len"
        )


class PrefixPool:
    """The named prefixes of one engine.

    Attributes:
        limits: What may be pinned.
        prefixes: By salt and name.
        version: Raised whenever other blocks are pinned.

    Args:
        block_pool: vLLM's `BlockPool`.
        limits: What may be pinned.
        clock: Returns seconds; never goes back.

    """

    def __init__(
        self,
        block_pool: Any,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.prefixes: dict[Key, Prefix] = {}
        self.version = 0
        self._block_pool = block_pool
        self._clock = clock

    @property
    def num_pinned(self) -> int:
        """Blocks that are pinned, each once."""
        return len(self._pinned_ids(self.prefixes.values()))

    def num_pinned_by(self, salt: str | None) -> int:
        """Blocks that one salt has pinned, each once."""
        return len(self._pinned_ids(self.of(salt)))

    def of(self, salt: str | None) -> list[Prefix]:
        """Return the prefixes of one salt."""
        return [prefix for prefix in self.prefixes.values() if prefix.salt == salt]

    def get(self, salt: str | None, name: str) -> Prefix:
        """Return a prefix.

        Raises:
            PinError: The caller has none of that name.

        """
        self.expire()
        try:
            return self.prefixes[salt, name]
        except KeyError:
            raise PinError(f"there is no prefix {name!r}", 404) from None

    def define(
        self,
        salt: str | None,
        name: str,
        token_ids: Sequence[int],
        hashes: Sequence[bytes],
        ttl_s: float | None,
    ) -> Prefix:
        """Name a prefix; one of the same name and other tokens is replaced.

        Raises:
            PinError: The salt has as many names as it may.

        """
        now = self._clock()
        known = self.prefixes.get((salt, name))
        if known is not None and known.token_ids == tuple(token_ids):
            known.ttl_s = ttl_s
            return known
        if known is not None:
            self.unpin(known)
        elif len(self.of(salt)) >= MAX_NAMES:
            raise PinError(
                f"there are {MAX_NAMES} prefixes already, which is as many as one salt "
                "may name: remove one",
                409,
            )
        prefix = Prefix(
            name, salt, tuple(token_ids), tuple(hashes), ttl_s, now, used_s=now
        )
        self.prefixes[salt, name] = prefix
        return prefix

    def check_room(self, salt: str | None, hashes: Iterable[bytes]) -> None:
        """Refuse, before anything is computed, what could not be pinned.

        Args:
            salt: The caller's.
            hashes: Of the blocks.

        Raises:
            PinError: The blocks that are not pinned yet exceed the cap.

        """
        held = {h for p in self.prefixes.values() for h in p.hashes[: len(p.held)]}
        self._check_cap(salt, len(set(hashes) - held), self.num_pinned)

    def pin(self, prefix: Prefix) -> None:
        """Pin those first blocks of a prefix that are in the cache.

        Raises:
            PinError: They exceed the cap; what was pinned before stays.

        """
        self.expire()
        found: list[Any] = []
        for block_hash in prefix.hashes:
            blocks = self._block_pool.get_cached_block(block_hash, [0])
            if blocks is None:
                break
            found += blocks
        pinned = self._pinned_ids(self.prefixes.values())
        wanted = len({block.block_id for block in found} - pinned)
        self._check_cap(prefix.salt, wanted, len(pinned))
        before, prefix.held = prefix.held, found
        self.version += 1
        self._block_pool.touch(found)  # first, so that none is free in between
        self._release(before)
        prefix.used_s = self._clock()
        prefix.lost = ""

    def unpin(self, prefix: Prefix, reason: str = "") -> int:
        """Let the blocks of a prefix go when others need them; returns how many."""
        held, prefix.held = prefix.held, []
        self.version += 1
        self._release(held)
        prefix.lost = reason
        return len(held)

    def unpin_all(self, reason: str) -> int:
        """Unpin every prefix; the names stay. Returns how many had pins."""
        pinned = [prefix for prefix in self.prefixes.values() if prefix.held]
        for prefix in pinned:
            self.unpin(prefix, reason)
        return len(pinned)

    def remove(self, salt: str | None, name: str) -> None:
        """Unpin a prefix and forget its name.

        Raises:
            PinError: The caller has none of that name.

        """
        self.unpin(self.get(salt, name))
        del self.prefixes[salt, name]

    def expire(self) -> None:
        """Unpin what was not hit for as long as it was to last."""
        now = self._clock()
        for prefix in self.prefixes.values():
            left = self.seconds_left(prefix, now)
            if prefix.held and left is not None and left <= 0:
                self.unpin(prefix, EXPIRED)

    def seconds_left(self, prefix: Prefix, now: float | None = None) -> float | None:
        """Return how long a pin lasts unless it is hit; None: for ever."""
        if prefix.ttl_s is None:
            return None
        now = self._clock() if now is None else now
        return prefix.used_s + prefix.ttl_s - now

    def on_request(self, hashes: Sequence[bytes]) -> list[Prefix]:
        """Count a hit of the prefixes that a request begins with; returns them."""
        self.expire()
        hit = [p for p in self.prefixes.values() if begins_with(hashes, p)]
        for prefix in hit:
            prefix.hits += 1
            prefix.used_s = self._clock()
        return hit

    def restore(self, prefix: Prefix, age_s: float, idle_s: float, reason: str) -> None:
        """Make a prefix as old as before a restart, and say why it has no pin."""
        now = self._clock()
        prefix.created_s, prefix.used_s = now - max(age_s, 0), now - max(idle_s, 0)
        prefix.lost = reason

    def age_s(self, prefix: Prefix) -> float:
        """Return how long ago a prefix was named."""
        return self._clock() - prefix.created_s

    def _release(self, blocks: Sequence[Any]) -> None:
        self._block_pool.free_blocks(reversed(blocks))

    def _check_cap(self, salt: str | None, wanted: int, pinned: int) -> None:
        if pinned + wanted > self.limits.cap:
            by_salt = None if salt is None else self.num_pinned_by(salt)
            raise PinError(self.limits.refusal(wanted, pinned, by_salt), 409)

    @staticmethod
    def _pinned_ids(prefixes: Iterable[Prefix]) -> set[int]:
        return {block.block_id for prefix in prefixes for block in prefix.held}


def begins_with(hashes: Sequence[bytes], prefix: Prefix) -> bool:
    """Whether a request with these hashes of blocks begins with a prefix."""
    count = len(prefix.hashes)
    return 0 < count <= len(hashes) and hashes[count - 1] == prefix.hashes[-1]
