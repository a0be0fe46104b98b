# SPDX-License-Identifier: Apache-2.0
"""Reading vLLM's metrics."""

import pytest

from polykv_vllm.scrape import (
    CacheReport,
    PrefixCounters,
    cache_report,
    prefix_counters,
)

METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",engine="0",kv_cache_dtype_skip_layers="[]",\
kv_cache_memory_bytes="268435456",kv_cache_size_tokens="11648"} 1.0
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
    assert cache_report(METRICS) == CacheReport(11648, 268435456, 128)


def test_missing_metric_is_an_error() -> None:
    with pytest.raises(LookupError, match="cache_config_info"):
        cache_report("")
    with pytest.raises(KeyError, match="kv_cache_size_tokens"):
        cache_report('vllm:cache_config_info{block_size="128"} 1.0')
