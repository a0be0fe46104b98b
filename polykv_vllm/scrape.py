# SPDX-License-Identifier: Apache-2.0
"""Reads vLLM's `/metrics`."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class PrefixCounters:
    """Tokens looked up in the prefix cache, and those found, since the start."""

    queried_tokens: int
    hit_tokens: int

    def __sub__(self, earlier: "PrefixCounters") -> "PrefixCounters":
        return PrefixCounters(
            self.queried_tokens - earlier.queried_tokens,
            self.hit_tokens - earlier.hit_tokens,
        )

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that were found; 0 if none was queried."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


@dataclass(frozen=True)
class CacheReport:
    """The KV cache as the engine describes it.

    Attributes:
        capacity_tokens: Tokens it holds.
        memory_bytes: Its size.
        block_size: Tokens of a block.
        num_blocks: Blocks, one of which vLLM keeps for itself.

    """

    capacity_tokens: int
    memory_bytes: int
    block_size: int
    num_blocks: int


@dataclass(frozen=True)
class SharingCounters:
    """Tokens attended to since the start, as polykv counts them.

    Attributes:
        shared_tokens: Read once for several requests.
        unshared_tokens: Read for one request each.

    """

    shared_tokens: float
    unshared_tokens: float

    def __sub__(self, earlier: "SharingCounters") -> "SharingCounters":
        return SharingCounters(
            self.shared_tokens - earlier.shared_tokens,
            self.unshared_tokens - earlier.unshared_tokens,
        )

    @property
    def shared_rate(self) -> float | None:
        """Share of the tokens that were read for several requests; None without any."""
        both = self.shared_tokens + self.unshared_tokens
        return self.shared_tokens / both if both else None


@dataclass(frozen=True)
class EngineLoad:
    """What the engine is doing at one moment.

    Attributes:
        running: Requests in the batch.
        waiting: Requests that are not.
        cache_usage: Share of the blocks, 0..1, that running requests hold.
        preemptions: Since the start.

    """

    running: int
    waiting: int
    cache_usage: float
    preemptions: int


def prefix_counters(metrics: str) -> PrefixCounters:
    """Return the prefix cache's counters."""
    return PrefixCounters(
        queried_tokens=int(_total(metrics, "vllm:prefix_cache_queries_total")),
        hit_tokens=int(_total(metrics, "vllm:prefix_cache_hits_total")),
    )


def cache_report(metrics: str) -> CacheReport:
    """Return what the engine says about its cache.

    Raises:
        LookupError: The metric is missing, or lacks one of the figures.

    """
    for labels, _ in _samples(metrics, "vllm:cache_config_info"):
        return CacheReport(
            capacity_tokens=int(labels["kv_cache_size_tokens"]),
            memory_bytes=int(labels["kv_cache_memory_bytes"]),
            block_size=int(labels["block_size"]),
            num_blocks=int(labels["num_gpu_blocks"]),
        )
    raise LookupError("vLLM's /metrics has no vllm:cache_config_info")


def sharing_counters(metrics: str) -> SharingCounters:
    """Return what polykv counted; zeros for a server with another cache."""
    tokens = {"shared": 0.0, "unshared": 0.0}
    for labels, value in _samples(metrics, "vllm:polykv_attended_tokens_total"):
        tokens[labels["path"]] += value
    return SharingCounters(tokens["shared"], tokens["unshared"])


def engine_load(metrics: str) -> EngineLoad:
    """Return how many requests run and wait, and what they hold."""
    return EngineLoad(
        running=int(_total(metrics, "vllm:num_requests_running")),
        waiting=int(_total(metrics, "vllm:num_requests_waiting")),
        cache_usage=_total(metrics, "vllm:kv_cache_usage_perc"),
        preemptions=int(_total(metrics, "vllm:num_preemptions_total")),
    )


def _total(metrics: str, name: str) -> float:
    return sum(value for _, value in _samples(metrics, name))


def _samples(metrics: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Return labels and value of each sample of the metric `name`."""
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == name
    ]
