# SPDX-License-Identifier: Apache-2.0
"""What the engines of a run have in common."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polykv_vllm.evaluate.arms import Arm
from polykv_vllm.evaluate.suite import Demand
from polykv_vllm.formats import get_format
from polykv_vllm.support import check_model


@dataclass(frozen=True)
class EngineSetup:
    """What all arms of a run have in common.

    Attributes:
        model: Directory or hub name.
        tokenizer: Of the model.
        context_tokens: Longest request that the model takes.
        demand: What the suites ask for.
        states: Folder of the reference's hidden states.
        logs: Folder for what the engines print.
        threads: Compute threads; None: as vLLM chooses.

    """

    model: str
    tokenizer: Any
    context_tokens: int
    demand: Demand
    states: Path
    logs: Path
    threads: int | None = None


def window_bytes(config: Any, arm: Arm) -> int:
    """Return the bytes of one sequence's raw pages in all layers; 0 without windows.

    Args:
        config: The model's, of transformers.
        arm: Which windows it has.

    """
    if arm.windows is None:
        return 0
    support = check_model(config, arm.kv_cache_dtype)
    token_bytes = support.uncompressed_bytes_per_token(arm.itemsize)
    return arm.windows.bytes_per_sequence(token_bytes)


def bytes_per_token(config: Any, arm: Arm) -> int:
    """Return the cache bytes of one token in all layers.

    Args:
        config: The model's, of transformers.
        arm: Whose cache.

    Raises:
        ValueError: The model cannot be served with the arm's format; says why.

    """
    support = check_model(config, arm.kv_cache_dtype)
    if not arm.is_ours:
        return support.uncompressed_bytes_per_token(
            1 if arm.kv_cache_dtype == "fp8" else arm.itemsize
        )
    if not support.ok:
        raise ValueError(
            f"it cannot be served with {get_format(arm.kv_cache_dtype).name}: "
            f"{'; '.join(support.reasons)}"
        )
    return support.bytes_per_token
