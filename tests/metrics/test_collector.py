# SPDX-License-Identifier: Apache-2.0
"""What a scrape shows of the workers' files."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from polykv_vllm.metrics import UNSHARED_REASONS, BatchSharing, Recorder
from polykv_vllm.metrics import worker_file as wf
from polykv_vllm.metrics.collector import PolyKVCollector

Samples = dict[tuple[str, ...], float]
DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def scrape(directory: Path) -> dict[str, Samples]:
    """Return name -> label values (model_name left out) -> value."""
    registry = CollectorRegistry()
    registry.register(PolyKVCollector(directory, "a-model"))
    found: dict[str, Samples] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        samples = found.setdefault(family.name, {})
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "a-model"
            samples[sample.name, *sample.labels.values()] = sample.value
    return {name.removeprefix("vllm:polykv_"): value for name, value in found.items()}


def batch(prefixes: int, readers_mean: float, readers_max: int = 4) -> BatchSharing:
    return BatchSharing(
        shared_tokens=60,
        unshared_tokens={"own_chunk": 40},
        prefixes=prefixes,
        readers_max=readers_max,
        readers_mean=readers_mean,
        physical_bytes=100,
        logical_bytes=834,
        build_seconds=0.5,
    )


@pytest.fixture
def two_by_two(tmp_path: Path) -> Path:
    """Two engines of two workers, two KV cache groups; one step each."""
    for engine in (0, 1):
        for rank in (0, 1):
            recorder = Recorder(wf.open_figures(tmp_path, engine, rank))
            layers = [recorder.add_layer() for _ in range(3)]
            recorder.record_batch(batch(1, 3.0), recorder.add_group())
            recorder.record_batch(batch(2, 4.5, readers_max=6), recorder.add_group())
            for layer in layers:
                recorder.add_attention_seconds(1 + engine + rank / 2, layer)
                recorder.add_store_seconds(0.25)
    return tmp_path


def test_batches_are_counted_once_per_engine(two_by_two: Path) -> None:
    found = scrape(two_by_two)
    assert found["steps"] == {
        ("vllm:polykv_steps_total", "0"): 1,
        ("vllm:polykv_steps_total", "1"): 1,
    }
    tokens = found["attended_tokens"]
    name = "vllm:polykv_attended_tokens_total"
    assert tokens[name, "0", "shared", ""] == 120
    assert tokens[name, "1", "unshared", "own_chunk"] == 80
    reasons = {key[3] for key in tokens if key[2] == "unshared"}
    assert reasons == set(UNSHARED_REASONS)
    assert len(tokens) == 2 * (1 + len(UNSHARED_REASONS))


def test_times_are_shown_per_worker(two_by_two: Path) -> None:
    found = scrape(two_by_two)
    name = "vllm:polykv_attention_seconds_total"
    assert found["attention_seconds"] == {
        (name, "0", "0"): 3.0,
        (name, "0", "1"): 4.5,
        (name, "1", "0"): 6.0,
        (name, "1", "1"): 7.5,
    }
    assert set(found["store_seconds"].values()) == {0.5}  # the last is not published
    assert set(found["forest_seconds"].values()) == {1.0}


def test_gauges_join_groups_and_workers(two_by_two: Path) -> None:
    found = scrape(two_by_two)
    expected = {
        "shared_prefixes": 2,
        "prefix_readers_max": 6,
        "prefix_readers_mean": (3.0 + 2 * 4.5) / 3,
        "prefix_physical_bytes": 2 * 2 * 100,
        "prefix_logical_bytes": 2 * 2 * 834,
        "prefix_compression_ratio": 8.34,
    }
    for name, value in expected.items():
        assert found[name] == {
            (f"vllm:polykv_{name}", "0"): value,
            (f"vllm:polykv_{name}", "1"): value,
        }


def test_before_the_first_request_all_is_zero_and_no_ratio(tmp_path: Path) -> None:
    wf.open_figures(tmp_path, 0, 0)
    found = scrape(tmp_path)
    assert found["prefix_compression_ratio"] == {}
    rest = [v for samples in found.values() for v in samples.values()]
    assert set(rest) == {0.0}


def test_without_workers_there_is_no_sample(tmp_path: Path) -> None:
    assert not any(scrape(tmp_path / "gone").values())


def test_names_follow_the_conventions(tmp_path: Path) -> None:
    for metric in PolyKVCollector(tmp_path, "m").describe():
        assert re.fullmatch(r"vllm:polykv_[a-z_]+[a-z]", metric.name)
        assert metric.type in ("counter", "gauge")  # LLM.get_metrics knows no other
        assert not metric.name.endswith("_total")  # the client library adds it
        assert metric.documentation.endswith(".")
        if "Time" in metric.documentation:
            assert metric.name.endswith("_seconds")
        if "ytes" in metric.documentation and "over" not in metric.documentation[:50]:
            assert metric.name.endswith(("_bytes", "_ratio"))


def test_every_metric_and_reason_is_documented(tmp_path: Path) -> None:
    text = DOCUMENT.read_text()
    for metric in PolyKVCollector(tmp_path, "m").describe():
        suffix = "_total" if metric.type == "counter" else ""
        assert f"| `{metric.name}{suffix}` | {metric.type} |" in text
    for reason in UNSHARED_REASONS:
        assert f"| `{reason}` |" in text
    # The others of the pool come from its connector, through vLLM.
    documented = set(re.findall(r"vllm:polykv_(?!pool_(?!pin))\w+", text))
    names = {metric.name for metric in PolyKVCollector(tmp_path, "m").describe()}
    assert {name.removesuffix("_total") for name in documented} == names
