# SPDX-License-Identifier: Apache-2.0
"""`/metrics` shows our metrics with one API server and with several."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.metrics import directory, open_recorder, serving
from tests.seams.test_engine_config import LLAMA


@pytest.fixture(autouse=True)
def _own_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    serving.stop()
    unregister_vllm_metrics()  # an engine of another test has left its pool's
    monkeypatch.setattr(directory, "default_base", lambda: tmp_path)
    yield
    serving.stop()
    open_recorder(0, 0)


@pytest.fixture
def start(tmp_path: Path, installed: None) -> Any:
    """Do what a front end does before it starts its engine."""

    def start(kv_cache_dtype: str) -> None:
        from vllm.engine.arg_utils import EngineArgs

        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        EngineArgs(
            model=str(tmp_path),
            kv_cache_dtype=kv_cache_dtype,
            skip_tokenizer_init=True,
        ).create_engine_config()
        open_recorder(0, 0)

    return start


def scrape() -> str:
    """Return `/metrics` of a front end that is made now."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router

    app = FastAPI()
    attach_router(app)
    return TestClient(app).get("/metrics").text


@pytest.fixture(params=["one API server", "several"])
def _api_servers(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    if request.param == "several":
        (tmp_path / "prometheus").mkdir()
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "prometheus"))


@pytest.mark.usefixtures("_api_servers")
def test_metrics_are_shown(start: Any) -> None:
    start("polykv")
    assert scrape().count("vllm:polykv_steps_total{") == 1


@pytest.mark.usefixtures("_api_servers")
def test_other_dtypes_have_none(start: Any, tmp_path: Path) -> None:
    start("auto")
    assert "vllm:polykv_" not in scrape()
    assert list(tmp_path.glob("server-*")) == []


@pytest.mark.usefixtures("removed")
def test_several_api_servers_need_the_seam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    parallel = SimpleNamespace(_api_process_count=1, _api_process_rank=0)
    model = SimpleNamespace(served_model_name="m")
    serving.start(SimpleNamespace(parallel_config=parallel, model_config=model))
    open_recorder(0, 0)
    assert "vllm:polykv_" not in scrape()
