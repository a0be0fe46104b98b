# SPDX-License-Identifier: Apache-2.0
"""Where the front end shows the metrics, and where not."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from polykv_vllm import envs
from polykv_vllm.metrics import directory, open_recorder, serving


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep directories apart from those of servers on this machine."""
    serving.stop()
    monkeypatch.setattr(directory, "default_base", lambda: tmp_path)
    yield tmp_path
    serving.stop()
    open_recorder(0, 0)  # back to figures of this process alone


def config(api_servers: int = 1, rank: int = 0, model: str = "m") -> Any:
    parallel = SimpleNamespace(_api_process_count=api_servers, _api_process_rank=rank)
    model_config = SimpleNamespace(served_model_name=model)
    return SimpleNamespace(parallel_config=parallel, model_config=model_config)


def exposed(registry: CollectorRegistry = REGISTRY) -> str:
    return generate_latest(registry).decode()


def test_one_api_server_shows_them_in_the_default_registry(base: Path) -> None:
    assert "vllm:polykv_" not in exposed()
    serving.start(config())
    assert envs.metrics_dir() in base.iterdir()
    recorder = open_recorder(0, 0)
    recorder.add_attention_seconds(1.5, recorder.add_layer())
    sample = 'vllm:polykv_steps_total{engine="0",model_name="m"} 1.0'
    assert sample in exposed()
    serving.stop()
    assert "vllm:polykv_" not in exposed()
    assert envs.metrics_dir() is None
    assert list(base.glob("server-*")) == []


def test_the_latest_engine_of_a_process_is_shown(base: Path) -> None:
    serving.start(config(model="first"))
    open_recorder(0, 0)
    serving.start(config(model="second"))
    open_recorder(0, 0)
    assert 'model_name="second"' in exposed() and 'model_name="first"' not in exposed()
    assert len(list(base.glob("server-*"))) == 1


def test_api_servers_share_their_parents_directory(base: Path) -> None:
    serving.start(config(api_servers=2, rank=-1))
    path = envs.metrics_dir()
    code = """
import sys
from types import SimpleNamespace as N
from prometheus_client import REGISTRY, generate_latest
from polykv_vllm import envs
from polykv_vllm.metrics import serving
parallel = N(_api_process_count=2, _api_process_rank=int(sys.argv[1]))
serving.start(N(parallel_config=parallel, model_config=N(served_model_name="m")))
print(envs.metrics_dir(), "polykv_steps_total{" in generate_latest(REGISTRY).decode())
"""
    open_recorder(0, 0)
    for rank in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code, rank], capture_output=True, text=True
        )
        assert done.stdout == f"{path} True\n", done.stderr
    assert list(base.glob("server-*")) == [path]  # no child took it along


def test_a_server_started_from_an_engines_process_has_its_own(base: Path) -> None:
    serving.start(config())
    inherited = os.environ[envs.METRICS_DIR]
    serving._directory, kept = None, serving._directory  # as in a fresh child
    serving.start(config())
    assert os.environ[envs.METRICS_DIR] != inherited
    assert kept is not None
    kept.remove()


def test_no_place_is_told_and_not_fatal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    logging.getLogger("vllm.polykv").addHandler(caplog.handler)
    monkeypatch.setattr(directory, "default_base", lambda: Path("/proc/nowhere"))
    serving.start(config())
    assert "/metrics will not have vllm:polykv_*" in caplog.text
    assert envs.metrics_dir() is None
    assert "vllm:polykv_" not in exposed()
    serving.start(config(api_servers=2, rank=0))
    assert "vllm:polykv_" not in exposed()


def test_registries_of_several_api_servers_get_them(base: Path) -> None:
    registry = CollectorRegistry()
    serving.add_to(registry)
    assert "polykv" not in exposed(registry)
    serving.start(config())
    serving.add_to(REGISTRY)  # has them: registering twice would raise
    serving.add_to(registry)
    open_recorder(0, 0)
    assert exposed(registry).count("vllm:polykv_steps_total{") == 1
