# SPDX-License-Identifier: Apache-2.0
"""The report's arithmetic."""

import math

import pytest

from polykv_vllm.bench.figures import (
    Spread,
    decode_rate,
    distinct_agents,
    percentiles_ms,
    phase_of,
    prefixes_per_gib,
    share_of_possible,
    token_bytes,
)
from polykv_vllm.scrape import CacheReport, PrefixCounters

# Two agents: the first starts to generate at 1 s, the second at 2 s; a token each
# second; the first ends at 5 s.
RECORD = {
    "completed": 2,
    "start_times": [100.0, 100.0],
    "ttfts": [1.0, 2.0],
    "itls": [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]],
    "output_lens": [5, 5],
    "total_output_tokens": 10,
    "output_throughput": 10 / 6,
}


def test_decode_rate_counts_while_all_agents_generate() -> None:
    # Between 2 s and 5 s both give three tokens.
    assert decode_rate(RECORD) == pytest.approx(6 / 3)


def test_decode_rate_knows_chunks_of_several_tokens() -> None:
    assert decode_rate(RECORD | {"total_output_tokens": 20}) == pytest.approx(4.0)


def test_decode_rate_without_a_common_time_is_nan() -> None:
    assert math.isnan(decode_rate(RECORD | {"ttfts": [1.0, 9.0]}))


def test_phase_takes_figures_from_client_and_server() -> None:
    phase = phase_of(
        RECORD, 10, PrefixCounters(200, 150), preemptions=1, shared_rate=0.5
    )
    assert phase.hit_rate == 0.75
    assert (phase.ttft_ms, phase.ttft_max_ms) == (1500.0, 2000.0)
    assert phase.itl_ms == {"p50": 1000.0, "p90": 1000.0, "p99": 1000.0}
    assert phase.tpot_ms["p50"] == 1000.0
    assert (phase.output_tokens, phase.requested_output_tokens) == (10, 10)


def test_percentiles_lie_between_values() -> None:
    found = percentiles_ms([0.001 * n for n in range(101)])
    assert found == {"p50": 50.0, "p90": 90.0, "p99": pytest.approx(99.0)}


def test_percentiles_of_nothing() -> None:
    assert all(map(math.isnan, percentiles_ms([]).values()))


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_share_of_possible() -> None:
    # Stock needs 4 s for what costs 2 s without attention; 3 s are half of the way.
    assert share_of_possible(1 / 4, 1 / 3, 1 / 2) == pytest.approx(0.5)
    assert math.isnan(share_of_possible(1.0, 1.0, 1.0))


def test_token_bytes_are_exact_where_the_config_explains_the_blocks() -> None:
    report = CacheReport(11648, 256 << 20, 128, 91)
    assert token_bytes(report, 23040) == 23040
    assert token_bytes(report, 0) == pytest.approx((256 << 20) / 11648)
    assert token_bytes(report, 11520) == pytest.approx((256 << 20) / 11648)


def test_what_fits() -> None:
    assert prefixes_per_gib(23040, 128, 3072) == 364 // 24
    assert prefixes_per_gib(8280, 128, 3000) == 1013 // 24
    assert distinct_agents(91, 128, 2048 + 32) == 90 // 17
