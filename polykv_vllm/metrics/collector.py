# SPDX-License-Identifier: Apache-2.0
"""The front end's side of the metrics: reads the workers' files at each scrape.

Of the workers of an engine, all see the same batches, so what describes a batch is
taken from the one with the lowest rank. Bytes are summed: each holds its own KV heads
and layers. Times are shown per worker, because workers run side by side.
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from polykv_vllm.metrics import worker_file as wf
from polykv_vllm.metrics.pins_file import PinFigures, read_pins

_TIMES = {
    wf.ATTENTION_SECONDS: (
        "attention",
        "Time a worker has spent in attention over the compressed cache, all layers.",
    ),
    wf.STORE_SECONDS: (
        "store",
        "Time a worker has spent quantizing keys and values to store, all layers.",
    ),
    wf.FOREST_SECONDS: (
        "forest",
        "Time a worker has spent finding the prefixes that requests share.",
    ),
}
_GAUGES = {
    "shared_prefixes": "Distinct cached prefixes with two readers or more in the "
    "latest batch; with several KV cache groups, in the group that has most.",
    "prefix_readers_max": "Requests of the latest batch that read its most popular "
    "shared prefix; 0 without one.",
    "prefix_readers_mean": "Requests of the latest batch that read a shared prefix, "
    "averaged over these prefixes; 0 without one.",
    "prefix_physical_bytes": "Compressed bytes of the shared prefixes of the latest "
    "batch, each block once, summed over layers and workers.",
    "prefix_logical_bytes": "Bytes that the shared prefixes of the latest batch would "
    "take in 16 bits with a private copy for each reader, summed likewise.",
    "prefix_compression_ratio": "vllm:polykv_prefix_logical_bytes over "
    "vllm:polykv_prefix_physical_bytes, what the format and sharing save together; "
    "absent without a shared prefix.",
}
_PINS = {
    "pinned_bytes": "Compressed bytes of the pinned blocks, each block once, summed "
    "over layers and workers.",
    "pin_cap_bytes": "Bytes that pins may hold.",
    "pinned_prefixes": "Named prefixes that are pinned, in whole or in part.",
}


class PolyKVCollector(Collector):
    """Shows one server's figures.

    Args:
        directory: Where its workers have their files.
        model_name: Value of the label `model_name`, as in vLLM's own metrics.

    """

    def __init__(self, directory: Path, model_name: str) -> None:
        self._directory = directory
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        """Return the metrics without a sample."""
        return self._metrics([], {})

    def collect(self) -> list[Metric]:
        """Return the metrics as they are now."""
        return self._metrics(wf.read_all(self._directory), read_pins(self._directory))

    def _metrics(
        self, workers: list[wf.WorkerFigures], pins: dict[int, PinFigures]
    ) -> list[Metric]:
        by_engine = groupby(workers, key=lambda worker: worker.engine)
        engines = [list(members) for _, members in by_engine]
        return [
            self._steps(engines),
            self._attended_tokens(engines),
            *self._times(workers),
            *self._gauges(engines),
            *self._pins(pins),
            *self._windows(engines),
        ]

    def _steps(self, engines: list[list[wf.WorkerFigures]]) -> Metric:
        text = "Forwards of the model with the compressed cache."
        metric = _counter("steps", text, ["model_name", "engine"])
        for leader, *_ in engines:
            metric.add_metric(self._labels(leader), leader.values[wf.STEPS])
        return metric

    def _attended_tokens(self, engines: list[list[wf.WorkerFigures]]) -> Metric:
        text = (
            "Pairs of a query token and a cached token that it attends to, once for "
            "each KV cache group: path=shared where the cached token was read once for "
            "several requests, else path=unshared and the reason."
        )
        labels = ["model_name", "engine", "path", "reason"]
        metric = _counter("attended_tokens", text, labels)
        for leader, *_ in engines:
            rows = [("shared", "", wf.SHARED_TOKENS)]
            rows += [("unshared", *item) for item in wf.UNSHARED_TOKENS.items()]
            for path, reason, index in rows:
                series = [*self._labels(leader), path, reason]
                metric.add_metric(series, leader.values[index])
        return metric

    def _times(self, workers: list[wf.WorkerFigures]) -> Iterator[Metric]:
        for index, (name, text) in _TIMES.items():
            labels = ["model_name", "engine", "rank"]
            metric = _counter(f"{name}_seconds", text, labels)
            for worker in workers:
                series = [*self._labels(worker), str(worker.rank)]
                metric.add_metric(series, worker.values[index])
            yield metric

    def _gauges(self, engines: list[list[wf.WorkerFigures]]) -> Iterator[Metric]:
        values = [(members[0], _gauge_values(members)) for members in engines]
        for name, text in _GAUGES.items():
            labels = ["model_name", "engine"]
            metric = GaugeMetricFamily(f"vllm:polykv_{name}", text, labels=labels)
            for leader, gauges in values:
                if name in gauges:
                    metric.add_metric(self._labels(leader), gauges[name])
            yield metric

    def _pins(self, pins: dict[int, PinFigures]) -> Iterator[Metric]:
        for name, text in _PINS.items():
            labels = ["model_name", "engine"]
            title = f"vllm:polykv_pool_{name}"
            metric = GaugeMetricFamily(title, text, labels=labels)
            for engine, figures in pins.items():
                series = [self._model_name, str(engine)]
                metric.add_metric(series, getattr(figures, name))
            yield metric

    def _windows(self, engines: list[list[wf.WorkerFigures]]) -> Iterator[Metric]:
        """Yield the metrics of windows of full precision; no samples without them."""
        labels = ["model_name", "engine"]
        leaders = [leader for leader, *_ in engines if leader.values[wf.WINDOW_PAGES]]
        text = (
            "Pairs of a query token and a cached token that were to be attended to in "
            "full precision and were as compressed, because the raw copy was gone; "
            "once for each KV cache group."
        )
        missing = _counter("window_missing_tokens", text, labels)
        for leader in leaders:
            missing.add_metric(self._labels(leader), leader.values[wf.WINDOW_MISSING])
        yield missing
        text = (
            "Raw pages of windows of full precision: state=held by running requests, "
            "kept with blocks for requests that continue from them, or free."
        )
        pages = GaugeMetricFamily(
            "vllm:polykv_window_pages", text, labels=[*labels, "state"]
        )
        for leader in leaders:
            held, kept = leader.values[wf.WINDOW_HELD], leader.values[wf.WINDOW_KEPT]
            free = leader.values[wf.WINDOW_PAGES] - held - kept
            for state, count in (("held", held), ("kept", kept), ("free", free)):
                pages.add_metric([*self._labels(leader), state], count)
        yield pages

    def _labels(self, worker: wf.WorkerFigures) -> list[str]:
        return [self._model_name, str(worker.engine)]


def _counter(name: str, text: str, labels: list[str]) -> CounterMetricFamily:
    # vLLM calls its parts "vllm:<part>_...", and its dashboards select "vllm:".
    return CounterMetricFamily(f"vllm:polykv_{name}", text, labels=labels)


def _gauge_values(members: list[wf.WorkerFigures]) -> dict[str, float]:
    """Return the gauges of one engine, a missing ratio left out."""
    groups = members[0].groups
    prefixes = sum(group.prefixes for group in groups)
    readers = sum(group.prefixes * group.readers_mean for group in groups)
    every = [group for worker in members for group in worker.groups]
    physical_bytes = sum(group.physical_bytes for group in every)
    logical_bytes = sum(group.logical_bytes for group in every)
    values = {
        "shared_prefixes": max(group.prefixes for group in groups),
        "prefix_readers_max": max(group.readers_max for group in groups),
        "prefix_readers_mean": readers / prefixes if prefixes else 0.0,
        "prefix_physical_bytes": physical_bytes,
        "prefix_logical_bytes": logical_bytes,
    }
    if physical_bytes:
        values["prefix_compression_ratio"] = logical_bytes / physical_bytes
    return values
