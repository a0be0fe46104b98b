# SPDX-License-Identifier: Apache-2.0
"""`/metrics` of a real server: three kinds of processes, one page."""

import json
import os
import re
import statistics
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from polykv_vllm import envs
from polykv_vllm.process import group_members
from polykv_vllm.server import VllmServer
from tests.e2e.conftest import TEXT

OPTIONS = {
    "--kv-cache-dtype": "polykv",
    "--kv-cache-memory-bytes": "64M",
    "--max-model-len": "512",
    "--served-model-name": "small",
}


@pytest.fixture(scope="module")
def server(
    smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    options = [word for option in OPTIONS.items() for word in option]
    log = tmp_path_factory.mktemp("server") / "log"
    server = VllmServer([str(smollm2), "--enforce-eager", *options], log)
    with server:
        server.wait_until_healthy()
        yield server


def complete(server: VllmServer, prompt: str, max_tokens: int, n: int = 1) -> None:
    """Ask for `n` completions of one prompt: requests that share its whole blocks."""
    body = {"model": "small", "prompt": prompt, "max_tokens": max_tokens, "n": n}
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions",
        data=json.dumps(body | {"ignore_eos": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        assert reply.status == 200


def figures(server: VllmServer) -> dict[str, float]:
    """Return our metrics; the labels are those of one model on one worker."""
    found = {}
    for family in text_string_to_metric_families(server.metrics()):
        for sample in family.samples:
            if sample.name.startswith("vllm:polykv_"):
                assert sample.labels["model_name"] == "small"
                assert sample.labels["engine"] == "0"
                assert sample.labels.get("rank", "0") == "0"
                name = sample.name.removeprefix("vllm:polykv_")
                found[name + sample.labels.get("reason", "")] = sample.value
    return found


def directory_of(server: VllmServer) -> Path:
    """Return the server's directory as its children were told.

    What this process passed on, if it has had an engine itself, is not the server's.
    """
    found = set()
    for pid in group_members(server.process_group):
        environment = Path(f"/proc/{pid}/environ").read_text(errors="replace")
        found |= set(re.findall(rf"\b{envs.METRICS_DIR}=([^\0]+)", environment))
    (path,) = found - {os.environ.get(envs.METRICS_DIR)}
    return Path(path)


def test_counters_follow_the_requests(server: VllmServer) -> None:
    before = figures(server)
    complete(server, TEXT[:600], max_tokens=8)
    between = figures(server)
    # One prefill and seven decodes, and a forward more that vLLM may schedule.
    assert 8 <= between["steps_total"] - before["steps_total"] <= 10
    complete(server, TEXT[:600], max_tokens=8)
    after = figures(server)
    for name in ("steps_total", "attention_seconds_total", "store_seconds_total"):
        assert before[name] < between[name] < after[name], name
    # Thirty layers in a few steps of a small model: milliseconds, never minutes.
    assert 1e-4 < after["attention_seconds_total"] < 60
    assert before.keys() == between.keys() == after.keys()


def figures_while(server: VllmServer, *request: Any) -> list[dict[str, float]]:
    """Return our metrics again and again, until the completions asked for have come."""
    pages = []
    with ThreadPoolExecutor(max_workers=1) as pool:
        completions = pool.submit(complete, server, *request)
        while not completions.done():
            pages.append(figures(server))
        completions.result()
    return pages


def test_counts_what_is_read_once_for_several(server: VllmServer) -> None:
    before = figures(server)
    # The gauges are the latest batch's, and the one that comes last may have lost the
    # readers before it: they are looked at while the requests run.
    pages = figures_while(server, TEXT[:1200], 64, 3)
    after = figures(server)
    shared = after["attended_tokens_total"] - before["attended_tokens_total"]
    # At least one tile of 128 tokens for three readers in most of the decodes.
    assert shared >= 40 * 3 * 128
    assert shared % 128 == 0
    ratios = [
        page["prefix_compression_ratio"]
        for page in pages
        if page["prefix_readers_mean"] == 3
    ]
    # 92 bytes instead of 256, once for all who read them.
    assert ratios
    assert statistics.median(ratios) == pytest.approx(3 * 256 / 92)
    assert after["forest_seconds_total"] > before["forest_seconds_total"]


def test_the_directory_ends_with_the_server(server: VllmServer) -> None:
    directory = directory_of(server)
    assert [path.name for path in directory.glob("engine*")] == [
        "engine0-rank0.metrics"
    ]
    server.stop()
    assert not directory.exists()
