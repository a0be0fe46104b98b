# SPDX-License-Identifier: Apache-2.0
"""Who computes a block that several requests need: one leader, the others wait.

A request is known here by the hashes of its full blocks. A hash covers all tokens up
to the end of its block, and whatever else makes two blocks differ (LoRA, salt,
images), so equal hashes at one index mean equal hashes at all smaller ones.

A follower waits only for blocks that a running request has yet to compute. The leader
is scheduled before it in every step and is at least as far, so waiting never takes
more steps than computing the same blocks would; only a leader that is aborted takes a
part of a block with it. Where the tokens of one request per step are capped, the
leader also computes the followers' share for them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Request = TypeVar("Request")


@dataclass(frozen=True)
class Leader(Generic[Request]):
    """A running request that has blocks to compute.

    Attributes:
        request: What the caller knows it by.
        hashes: Hashes of its full blocks, computed or not.
        num_cached: How many of them others can already find in the cache.

    """

    request: Request
    hashes: Sequence[bytes]
    num_cached: int


@dataclass(frozen=True)
class Wait(Generic[Request]):
    """The reason for which a request is not scheduled in this step.

    Attributes:
        leader: The request that computes the blocks.
        num_shared: Blocks that both have in common, from the first one on: when the
            leader has cached that many, the follower goes on.

    """

    leader: Leader[Request]
    num_shared: int


def num_usable(num_tokens: int, block_size: int) -> int:
    """Blocks that a request can take from the cache: the last token is computed."""
    return max(num_tokens - 1, 0) // block_size


def num_shared(first: Sequence[bytes], second: Sequence[bytes], limit: int) -> int:
    """Count the blocks, at most `limit`, that two sequences have in common.

    Hashes are chained, so the place where they part is found by bisection.
    """
    low, high = 0, min(limit, len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def find_wait(
    hashes: Sequence[bytes],
    usable: int,
    num_hit: Callable[[int], int],
    leaders: Iterable[Leader[Request]],
) -> Wait[Request] | None:
    """Find the leader that a request has to wait for.

    Args:
        hashes: Hashes of the request's full blocks.
        usable: See `num_usable`.
        num_hit: Called with a number of blocks that the request finds in the cache;
            returns how many it finds in all. Called only where it matters.
        leaders: Running requests, in the order in which they are scheduled.

    Returns:
        None when the request is to be scheduled.

    """
    for leader in leaders:
        shared = num_shared(leader.hashes, hashes, usable)
        if leader.num_cached < shared and num_hit(leader.num_cached) < shared:
            return Wait(leader, shared)
    return None


@dataclass(frozen=True)
class Share:
    """What a leader may compute on behalf of those that wait for it.

    Attributes:
        num_followers: Requests that waited in the last step.
        end: Number of tokens, from the first one on, that they wait for.

    """

    num_followers: int
    end: int

    def joined_by(self, end: int) -> "Share":
        """Return the share with one follower more."""
        return Share(self.num_followers + 1, max(self.end, end))

    def chunk(self, start: int, missing: int, own: int, budget: int) -> int:
        """Enlarge a leader's chunk.

        Args:
            start: Tokens that the leader has computed.
            missing: Tokens that it has yet to compute.
            own: Tokens of its own chunk; each follower would have had one like it.
            budget: Tokens left in this step.

        Returns:
            At least `own`.

        """
        helped = min(self.num_followers * own, max(self.end - start, 0))
        return max(own, min(own + helped, missing, budget))
