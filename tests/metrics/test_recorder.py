# SPDX-License-Identifier: Apache-2.0
"""What a worker records."""

from pathlib import Path

import pytest

from polykv_vllm import envs
from polykv_vllm.metrics import BatchSharing, Recorder, get_recorder, open_recorder
from polykv_vllm.metrics import worker_file as wf

BATCH = BatchSharing(
    shared_tokens=100,
    unshared_tokens={"own_chunk": 3, "cost_rule": 20},
    prefixes=2,
    readers_max=5,
    readers_mean=3.5,
    physical_bytes=1000,
    logical_bytes=9000,
    build_seconds=0.125,
)


@pytest.fixture
def figures() -> wf.Figures:
    return wf.private_figures()


def test_tokens_add_up_and_gauges_are_the_latest(figures: wf.Figures) -> None:
    recorder = Recorder(figures)
    recorder.record_batch(BATCH)
    recorder.record_batch(BATCH)
    recorder.record_batch(BatchSharing(unshared_tokens={"own_chunk": 4}))
    assert figures[wf.SHARED_TOKENS] == 200
    found = {reason: figures[i] for reason, i in wf.UNSHARED_TOKENS.items()}
    rest = {"no_other_reader": 0, "switched_off": 0}
    assert found == {"own_chunk": 10, "cost_rule": 40, **rest}
    assert figures[wf.FOREST_SECONDS] == 0.25
    assert list(figures[wf.GROUPS : wf.GROUPS + 5]) == [0, 0, 0, 0, 0]


def test_groups_have_gauges_of_their_own(figures: wf.Figures) -> None:
    recorder = Recorder(figures)
    assert [recorder.add_group(), recorder.add_group()] == [0, 1]
    recorder.record_batch(BATCH, group=1)
    assert list(figures[wf.GROUPS : wf.GROUPS + 10]) == [
        *(0, 0, 0, 0, 0),
        *(2, 5, 3.5, 1000, 9000),
    ]
    for _ in range(wf.MAX_GROUPS - 2):
        recorder.add_group()
    with pytest.raises(ValueError, match="room for 64 KV cache groups"):
        recorder.add_group()


def test_an_unknown_reason_names_the_known(figures: wf.Figures) -> None:
    with pytest.raises(ValueError, match="unknown reason 'mood'; possible: no_other"):
        Recorder(figures).record_batch(BatchSharing(unshared_tokens={"mood": 1}))


def test_seconds_are_published_once_per_step(figures: wf.Figures) -> None:
    recorder = Recorder(figures)
    layers = [recorder.add_layer() for _ in range(3)]
    for step in (1, 2):
        for layer in layers:
            recorder.add_store_seconds(0.5)
            recorder.add_attention_seconds(0.25, layer)
        assert figures[wf.STEPS] == step
        assert figures[wf.STORE_SECONDS] == step * 1.5
        assert figures[wf.ATTENTION_SECONDS] == step * 0.75


def test_one_layer_is_first_and_last(figures: wf.Figures) -> None:
    recorder = Recorder(figures)
    recorder.add_attention_seconds(1.0, recorder.add_layer())
    assert (figures[wf.STEPS], figures[wf.ATTENTION_SECONDS]) == (1, 1.0)


def test_the_directory_decides_who_sees_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(envs.METRICS_DIR, raising=False)
    alone = open_recorder(0, 0)
    alone.record_batch(BATCH)
    assert open_recorder(1, 1) is get_recorder() is alone

    monkeypatch.setenv(envs.METRICS_DIR, str(tmp_path))
    seen = open_recorder(0, 2)
    assert open_recorder(0, 2) is get_recorder() is seen
    assert seen is not alone
    seen.record_batch(BATCH)
    (worker,) = wf.read_all(tmp_path)
    assert (worker.rank, worker.values[wf.SHARED_TOKENS]) == (2, 100)
    monkeypatch.delenv(envs.METRICS_DIR)
    assert open_recorder(0, 2) is not seen


def test_a_missing_directory_is_told_and_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    logging.getLogger("vllm.polykv").addHandler(caplog.handler)
    monkeypatch.setenv(envs.METRICS_DIR, str(tmp_path / "gone"))
    open_recorder(0, 0).record_batch(BATCH)
    assert "metrics will be missing" in caplog.text
    monkeypatch.delenv(envs.METRICS_DIR)
    open_recorder(0, 0)
