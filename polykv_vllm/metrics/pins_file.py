# SPDX-License-Identifier: Apache-2.0
"""The file through which an engine core shows what is pinned in its cache.

It is made as a worker's (`worker_file.py`), beside the workers' files; its name is none
of theirs, so it is not read as one.
"""

import logging
import re
from dataclasses import astuple, dataclass
from pathlib import Path

from polykv_vllm import envs
from polykv_vllm.metrics import worker_file as wf

logger = logging.getLogger("vllm.polykv")

_NAME = re.compile(r"engine(\d+)-pins\.metrics")


@dataclass(frozen=True)
class PinFigures:
    """What is pinned in the cache of one engine.

    Attributes:
        pinned_bytes: Compressed bytes of the pinned blocks, each once, all workers.
        pin_cap_bytes: What pins may hold.
        pinned_prefixes: Named prefixes that are pinned, in whole or in part.

    """

    pinned_bytes: float
    pin_cap_bytes: float
    pinned_prefixes: float


class PinRecorder:
    """Shows the pins of an engine to the front end, if there is one that collects.

    Without one, or where its directory cannot be used (a warning says so), nothing is
    shown.

    Args:
        engine: Index of the data parallel engine, vLLM's label `engine`.

    """

    def __init__(self, engine: int) -> None:
        self._figures = wf.private_figures()
        directory = envs.metrics_dir()
        if directory is not None:
            try:
                self._figures = wf.open_file(directory / f"engine{engine}-pins.metrics")
            except (OSError, ValueError) as error:
                logger.warning("metrics of pins will be missing: %s", error)

    def record(self, pins: PinFigures) -> None:
        """Make these the latest figures."""
        for index, value in enumerate(astuple(pins)):
            self._figures[index] = value


def read_pins(directory: Path) -> dict[int, PinFigures]:
    """Return the figures of every engine that has named prefixes, by its index.

    Raises:
        ValueError: A file has such a name and is not one of this version.

    """
    found = {}
    names = (path.name for path in directory.glob("*.metrics"))
    for match in filter(None, map(_NAME.fullmatch, names)):
        try:
            values = wf.read_file(directory / match.string)
        except FileNotFoundError:  # the server is ending
            continue
        found[int(match[1])] = PinFigures(*values[:3])
    return found
