# SPDX-License-Identifier: Apache-2.0
"""What windows of full precision take: pages, bytes, and for how many sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

from polykv_vllm.formats import WINDOW_PAGE_TOKENS

PAGE_TOKENS = WINDOW_PAGE_TOKENS
"""Tokens of a raw page. Block sizes are multiples of this."""

PLAN_ATTRIBUTE = "polykv_windows"
"""Of vLLM's `KVCacheConfig`: the plan; of a model runner: its groups' windows."""

RECOMMENDED_WINDOWS = (64, 256)
"""First and last tokens that suit formats of two bits."""

WINDOWS = "windows"
"""What of an arm's name, in `polykv eval` and `polykv bench`, asks for windows."""

MEMORY_SHARE = 0.25
"""Most of the cache memory that raw pages take, unless their number is asked for."""


class WindowError(ValueError):
    """Windows cannot be had as asked; the message says what is possible."""


@dataclass(frozen=True)
class WindowSizes:
    """How many tokens of a sequence are seen in full precision.

    Attributes:
        sink_tokens: First tokens of the sequence.
        recent_tokens: Newest tokens, a query's own included.
        draft_tokens: Tokens of a step that may be rejected and computed anew.

    """

    sink_tokens: int
    recent_tokens: int
    draft_tokens: int = 0

    @classmethod
    def parse(cls, text: str) -> "WindowSizes":
        """Read "64/256": the first 64 and the last 256 tokens.

        Raises:
            WindowError: The text is something else.

        """
        parts = text.split("/")
        if len(parts) != 2 or not all(part.isdecimal() for part in parts):
            raise WindowError(
                f"windows {text!r}: possible are two numbers as in 64/256, the first "
                "64 and the last 256 tokens of a sequence"
            )
        return cls(*map(int, parts))

    @classmethod
    def of_arm(cls, suffix: str, default: "WindowSizes") -> "WindowSizes":
        """Read "windows" or, with its sizes, "windows64-256".

        Raises:
            WindowError: The text is something else.

        """
        if suffix == WINDOWS:
            return default
        name, sizes = suffix[: len(WINDOWS)], suffix[len(WINDOWS) :]
        try:
            return cls.parse(sizes.replace("-", "/") if name == WINDOWS else suffix)
        except WindowError:
            raise WindowError(
                f"there are no {suffix!r}: possible is {WINDOWS}, or with their sizes "
                f"{WINDOWS}64-256"
            ) from None

    @property
    def option(self) -> dict[str, int]:
        """The option `windows` that asks for these sizes."""
        return {"sink_tokens": self.sink_tokens, "recent_tokens": self.recent_tokens}

    @property
    def sink_pages(self) -> int:
        """Pages of the first tokens of one sequence."""
        return -(-self.sink_tokens // PAGE_TOKENS)

    @property
    def recent_pages(self) -> int:
        """Most pages that the newest tokens of one sequence touch between two steps."""
        tokens = self.kept_tokens()
        return (tokens - 2) // PAGE_TOKENS + 2 if tokens else 0

    @property
    def pages_per_sequence(self) -> int:
        """Pages that a running sequence may need."""
        return self.sink_pages + self.recent_pages

    def bytes_per_sequence(self, token_bytes: int) -> int:
        """Return the bytes of one sequence's pages.

        Args:
            token_bytes: Of one token in the model's dtype, all layers.

        """
        return self.pages_per_sequence * PAGE_TOKENS * token_bytes

    def kept_tokens(self, sliding_window: int = -1) -> int:
        """Count the newest tokens that a sequence keeps for its next step.

        Of a window of W tokens the query's own is new; tokens before those that a step
        may reject must be there, too.

        Args:
            sliding_window: Tokens that the layer sees; -1 for all.

        """
        reach = self.recent_tokens
        if sliding_window >= 0:
            reach = min(reach, sliding_window)
        return reach - 1 + self.draft_tokens if reach > 1 else 0


def page_bytes(num_kv_heads: int, head_size: int, itemsize: int) -> int:
    """Return the bytes of a raw page in one layer: keys and values."""
    return 2 * num_kv_heads * PAGE_TOKENS * head_size * itemsize


@dataclass(frozen=True)
class WindowPlan:
    """What an engine sets aside for windows.

    Attributes:
        sizes: Of the windows.
        num_sequences: Sequences that run at once, at most.

    """

    sizes: WindowSizes
    num_sequences: int

    @property
    def num_pages(self) -> int:
        """Raw pages of each layer."""
        return self.num_sequences * self.sizes.pages_per_sequence


def plan_windows(
    sizes: WindowSizes,
    page_bytes: Sequence[int],
    memory: Sequence[int],
    max_sequences: int,
    is_asked: bool,
) -> WindowPlan:
    """Say how many sequences get windows.

    Args:
        sizes: Of the windows.
        page_bytes: Bytes of a page in all layers of each worker.
        memory: Bytes that each worker has for its cache, pages included.
        max_sequences: Most sequences at once.
        is_asked: Whether that many are asked for by name; else there are fewer where
            their pages would take more than `MEMORY_SHARE` of the memory.

    Raises:
        WindowError: The memory is too small.

    """
    share = 1.0 if is_asked else MEMORY_SHARE
    workers = [
        (total, size * sizes.pages_per_sequence)
        for total, size in zip(memory, page_bytes, strict=True)
        if size
    ]
    fitting = [int(total * share) // each for total, each in workers if each]
    num_sequences = min([max_sequences, *fitting])
    if num_sequences < (max_sequences if is_asked else 1):
        total, each = min(workers, key=lambda worker: worker[0] / worker[1])
        asked = f"{max_sequences} sequences do" if is_asked else "even one does"
        raise WindowError(
            f"windows of {sizes.sink_tokens} first and {sizes.recent_tokens} last "
            f"tokens take {each / 2**20:.1f} MiB for each sequence: {asked} not fit "
            f"into {share:.0%} of the cache memory of {total / 2**20:.1f} MiB. "
            f"Possible: the option windows.max_sequences up to {total // each}, a "
            "larger --kv-cache-memory-bytes, or smaller windows"
        )
    return WindowPlan(sizes, num_sequences)
