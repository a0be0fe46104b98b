# SPDX-License-Identifier: Apache-2.0
"""Samples of an engine's load."""

from polykv_vllm.bench.sampler import peak_usage_by_running
from polykv_vllm.scrape import EngineLoad


def test_peaks_are_kept_for_each_number_of_running_requests() -> None:
    samples = [
        EngineLoad(0, 0, 0.0, 0),
        EngineLoad(2, 0, 0.3, 0),
        EngineLoad(1, 0, 0.2, 0),
        EngineLoad(2, 1, 0.4, 0),
    ]
    assert peak_usage_by_running(samples) == {1: 0.2, 2: 0.4}
