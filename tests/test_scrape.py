# SPDX-License-Identifier: Apache-2.0
"""Reading vLLM's metrics."""

import pytest

from polykv_vllm.scrape import (
    CacheReport,
    EngineLoad,
    PrefixCounters,
    SharingCounters,
    cache_report,
    engine_load,
    prefix_counters,
    sharing_counters,
)

METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",engine="0",kv_cache_dtype_skip_layers="[]",\
kv_cache_memory_bytes="268435456",kv_cache_size_tokens="11648",num_gpu_blocks="91"} 1.0
vllm:prefix_cache_queries_total{engine="0",model_name="a{b}"} 9361.0
vllm:prefix_cache_queries_created{engine="0",model_name="a{b}"} 1.79e+09
vllm:prefix_cache_hits_total{engine="0",model_name="a{b}"} 8064.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="a{b}"} 7.0
"""


def test_prefix_counters() -> None:
    assert prefix_counters(METRICS) == PrefixCounters(9361, 8064)


def test_counters_of_several_engines_add_up() -> None:
    second = METRICS.replace('engine="0"', 'engine="1"')
    assert prefix_counters(METRICS + second) == PrefixCounters(2 * 9361, 2 * 8064)


def test_hit_rate_of_a_wave() -> None:
    wave = PrefixCounters(300, 200) - PrefixCounters(100, 50)
    assert wave.hit_rate == 0.75
    assert PrefixCounters(0, 0).hit_rate == 0.0


def test_cache_report() -> None:
    assert cache_report(METRICS) == CacheReport(11648, 268435456, 128, 91)


def test_engine_load() -> None:
    metrics = (
        METRICS
        + """\
vllm:num_requests_running{engine="0"} 15.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:num_preemptions_total{engine="0"} 3.0
"""
    )
    assert engine_load(metrics) == EngineLoad(15, 2, 0.25, 3)
    assert engine_load("") == EngineLoad(0, 0, 0.0, 0)


def test_sharing_counters() -> None:
    name = "vllm:polykv_attended_tokens_total"
    metrics = f"""\
{name}{{engine="0",path="shared",reason=""}} 90.0
{name}{{engine="0",path="unshared",reason="single"}} 6.0
{name}{{engine="0",path="unshared",reason="tail"}} 4.0
"""
    assert sharing_counters(metrics) == SharingCounters(90, 10)
    assert (sharing_counters(metrics) - SharingCounters(40, 0)).shared_rate == 50 / 60
    assert sharing_counters("").shared_rate is None


def test_missing_metric_is_an_error() -> None:
    with pytest.raises(LookupError, match="cache_config_info"):
        cache_report("")
    with pytest.raises(KeyError, match="kv_cache_size_tokens"):
        cache_report('vllm:cache_config_info{block_size="128"} 1.0')
