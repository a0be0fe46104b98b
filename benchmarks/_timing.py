# SPDX-License-Identifier: Apache-2.0
"""Timing of several arms in one run.

The arms take turns within every round, and the order rotates from round to round, so
that a slow second of the machine hits all of them. Each arm owns several copies of the
cache it reads and moves on with every call: a copy comes round again only after more
bytes were read than the last-level cache holds, as in an engine whose other layers
and weights pass through the caches between two calls.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from polykv_vllm.reporting.environment import last_level_cache_bytes

Arm = Callable[[int], None]
"""Runs once, on the copy of its cache with the given number (modulo its copies)."""

_COLD_FACTOR = 1.25
_MIN_COLD_BYTES = 64 << 20


@dataclass(frozen=True)
class Timing:
    """Spread of one arm's calls, seconds."""

    median_s: float
    p10_s: float
    p90_s: float
    repeats: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Timing":
        """Summarize `seconds`, one entry per call (at least one)."""
        ordered = sorted(seconds)
        last = len(ordered) - 1
        return cls(
            median_s=statistics.median(ordered),
            p10_s=ordered[round(0.1 * last)],
            p90_s=ordered[round(0.9 * last)],
            repeats=len(ordered),
        )

    def as_dict(self) -> dict[str, float | int]:
        """Return the fields for a JSON report."""
        return asdict(self)


def cold_footprint_bytes() -> int:
    """Bytes to read before a copy comes round again, so that it is cold by then."""
    return max(_MIN_COLD_BYTES, int(_COLD_FACTOR * last_level_cache_bytes()))


def copies_for(footprint_bytes: int, bytes_per_round: int) -> int:
    """How many copies of its cache each arm needs.

    Args:
        footprint_bytes: What all arms together are to read before they start over.
        bytes_per_round: What all arms together read in one round.

    """
    return max(2, -(-footprint_bytes // max(1, bytes_per_round)))


def alternate(
    arms: Mapping[str, Arm],
    repeats: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time every arm `repeats` times, taking turns.

    Args:
        arms: Name to arm; each is called with the number of the round.
        repeats: Timed rounds.
        warmup: Rounds before them that are not timed.
        clock: Seconds; `time.thread_time` counts the calling thread's work only.

    """
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(warmup + repeats):
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            arm = arms[name]
            start = clock()
            arm(round_number)
            elapsed = clock() - start
            if round_number >= warmup:
                seconds[name].append(elapsed)
    return {name: Timing.of(values) for name, values in seconds.items()}
