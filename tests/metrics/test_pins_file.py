# SPDX-License-Identifier: Apache-2.0
"""What is pinned, from the engine core to a scrape."""

import logging
from pathlib import Path

import pytest

from polykv_vllm import envs
from polykv_vllm.metrics import worker_file as wf
from polykv_vllm.metrics.pins_file import PinFigures, PinRecorder, read_pins
from tests.metrics.test_collector import scrape


def test_the_latest_figures_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.METRICS_DIR, str(tmp_path))
    wf.open_figures(tmp_path, 0, 0)
    assert read_pins(tmp_path) == {}
    recorder = PinRecorder(0)
    for pinned in (10.0, 25e9):
        recorder.record(PinFigures(pinned, 50e9, 3.0))
    assert read_pins(tmp_path) == {0: PinFigures(25e9, 50e9, 3.0)}
    assert len(wf.read_all(tmp_path)) == 1  # it is no worker
    found = scrape(tmp_path)
    assert found["pool_pinned_bytes"] == {("vllm:polykv_pool_pinned_bytes", "0"): 25e9}
    assert list(found["pool_pin_cap_bytes"].values()) == [50e9]
    assert list(found["pool_pinned_prefixes"].values()) == [3.0]


def test_without_a_front_end_nothing_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(envs.METRICS_DIR, raising=False)
    PinRecorder(0).record(PinFigures(1, 2, 3))
    monkeypatch.setenv(envs.METRICS_DIR, str(tmp_path / "gone"))
    logger = logging.getLogger("vllm.polykv")
    logger.addHandler(caplog.handler)
    try:
        PinRecorder(0).record(PinFigures(1, 2, 3))
    finally:
        logger.removeHandler(caplog.handler)
    assert "metrics of pins will be missing" in caplog.text
