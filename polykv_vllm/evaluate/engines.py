# SPDX-License-Identifier: Apache-2.0
"""The engines that an arm can run on."""

from collections.abc import Callable
from typing import Any

from polykv_vllm.evaluate.arms import Arm
from polykv_vllm.evaluate.setup import EngineSetup

Stage = Callable[[str], None]


def _vllm(setup: EngineSetup, arm: Arm, size: int, stage: Stage) -> Any:
    from polykv_vllm.evaluate.vllm_engine import VllmEngine

    return VllmEngine(setup, arm, size, stage)


def _hf(setup: EngineSetup, arm: Arm, size: int, stage: Stage) -> Any:
    from polykv_vllm.evaluate.hf_engine import HfEngine

    return HfEngine(setup, arm, size, stage)


ENGINES: dict[str, Callable[[EngineSetup, Arm, int, Stage], Any]] = {
    "vllm": _vllm,
    "hf": _hf,
}
"""By name. Each starts an `Engine` that has `facts: dict[str, Any]`, too."""


def start_engine(
    name: str, setup: EngineSetup, arm: Arm, bytes_per_token: int, stage: Stage
) -> Any:
    """Return a started engine of `ENGINES`.

    Args:
        name: A key of `ENGINES`.
        setup: Common to all arms.
        arm: Whose cache it has.
        bytes_per_token: Of the arm's cache, all layers.
        stage: Told in a few words what is being done.

    """
    return ENGINES[name](setup, arm, bytes_per_token, stage)
