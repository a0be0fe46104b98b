# SPDX-License-Identifier: Apache-2.0
"""What a suite is: inputs made before any engine starts, figures from each arm.

The runner calls, in this order:

    suite = SuiteClass.from_options(options)      errors of options and files
    demand = suite.prepare(tokenizer)             errors of texts; tells engine sizes
    for each arm, the reference first:
        figures = suite.run(engine, arm, store, progress)
    report = SuiteClass.report(records)           from the stored records alone

`run` may be interrupted at any time. What it puts into `store.items(...)` is kept, and
is there when the same command goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from polykv_vllm.evaluate.arms import Arm
from polykv_vllm.evaluate.engine import Engine
from polykv_vllm.evaluate.options import SuiteOptions
from polykv_vllm.evaluate.results import RunStore
from polykv_vllm.reporting.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[int, int], None]
"""Called with the number of finished items and of all items."""

Records = Mapping[str, Mapping[str, Any]]
"""By arm: "figures" (what `run` returned), "arm", "suite", "settings",
"bytes_per_token", "seconds", "environment", "engine"."""


@dataclass(frozen=True)
class Demand:
    """What a suite asks of every engine.

    Attributes:
        request_tokens: Longest request, prompt and answer together.
        live_tokens: Most tokens that must be in the cache at once.
        num_seqs: Most requests that run at once.

    """

    request_tokens: int
    live_tokens: int
    num_seqs: int = 1

    def __or__(self, other: Demand) -> Demand:
        """Return what serves both."""
        return Demand(
            max(self.request_tokens, other.request_tokens),
            max(self.live_tokens, other.live_tokens),
            max(self.num_seqs, other.num_seqs),
        )


@dataclass
class SuiteReport:
    """What a suite has to show.

    Attributes:
        tables: In this order.
        notes: What a reader must know, such as fewer items than asked.
        plots: File name to a function that draws it.

    """

    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plots: dict[str, Callable[[], Figure]] = field(default_factory=dict)


class Suite(Protocol):
    """One kind of measurement."""

    name: ClassVar[str]
    """Of `--suite`, and part of file names."""

    @classmethod
    def from_options(cls, options: SuiteOptions) -> Self:
        """Take what concerns this suite.

        Raises:
            EvalError: A file is missing or malformed, an option makes no sense.

        """

    def prepare(self, tokenizer: Any, context_tokens: int) -> Demand:
        """Tokenise the inputs.

        Args:
            tokenizer: A transformers tokenizer.
            context_tokens: Longest request that the model takes.

        Raises:
            EvalError: Too little text, or requests that are too long.

        """

    def settings(self) -> dict[str, Any]:
        """Return what makes two records comparable: options, digests of the inputs.

        Called after `prepare`.
        """

    def run(
        self, engine: Engine, arm: Arm, store: RunStore, progress: Progress
    ) -> dict[str, Any]:
        """Measure one arm; return its figures for a JSON file.

        Args:
            engine: Of this arm.
            arm: The reference comes first, so its record and items are in `store`.
            store: Keeps single items, and has what other arms did.
            progress: To be told of finished items.

        """

    @staticmethod
    def report(records: Records) -> SuiteReport:
        """Make tables and plots from the records of all arms that have one."""
