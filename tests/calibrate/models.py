# SPDX-License-Identifier: Apache-2.0
"""Calibrations of small random models, without a tokenizer."""

from pathlib import Path
from typing import Any

import torch

from polykv_vllm.calibrate.artifact import CalibrationRecord, TextRecord
from polykv_vllm.calibrate.collect import collect
from polykv_vllm.calibrate.run import write_calibration


def random_sequences(
    vocab_size: int, count: int = 4, length: int = 96
) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, vocab_size, (count, length), generator=generator)
    return [list(row) for row in tokens.tolist()]


def calibrate_random(
    model: Any, folder: Path, transform: str = "wush", center_keys: bool = True
) -> CalibrationRecord:
    """Calibrate a model of random weights on random tokens."""
    sequences = random_sequences(model.config.vocab_size)
    statistics = collect(model, sequences, aware=transform == "wush_a")
    read = TextRecord(
        digest="0" * 16, files=["random"], sequences=4, tokens=384, seed=0
    )
    return write_calibration(
        folder, model, statistics, read, transform, center_keys=center_keys
    )
