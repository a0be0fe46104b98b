# SPDX-License-Identifier: Apache-2.0
"""Arms take turns, copies rotate, summaries are right."""

from pathlib import Path

from benchmarks._timing import (
    Timing,
    alternate,
    cold_footprint_bytes,
    copies_for,
    last_level_cache_bytes,
)


def test_timing_summarizes() -> None:
    timing = Timing.of([float(n) for n in range(11, 0, -1)])
    assert timing == Timing(median_s=6.0, p10_s=2.0, p90_s=10.0, repeats=11)


def test_timing_of_one_call() -> None:
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)


def test_arms_take_turns_and_the_order_rotates() -> None:
    calls: list[tuple[str, int]] = []
    arms = {name: lambda n, name=name: calls.append((name, n)) for name in "abc"}
    timings = alternate(arms, repeats=3, warmup=1)
    rounds = [calls[start : start + 3] for start in range(0, 12, 3)]
    assert ["".join(name for name, _ in each) for each in rounds] == [
        "abc",
        "bca",
        "cab",
        "abc",
    ]
    assert [{number for _, number in each} for each in rounds] == [{0}, {1}, {2}, {3}]
    assert {name: timing.repeats for name, timing in timings.items()} == dict.fromkeys(
        "abc", 3
    )


def test_last_level_cache_is_the_largest(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "2048K", "300M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_level_cache_bytes(str(tmp_path)) == 300 << 20
    assert last_level_cache_bytes(str(tmp_path / "none")) == 0


def test_copies_cover_the_footprint() -> None:
    assert copies_for(100, 30) == 4
    assert copies_for(0, 30) == 2
    assert cold_footprint_bytes() > last_level_cache_bytes()


def test_clock_can_be_chosen() -> None:
    ticks = iter(range(100))
    timings = alternate({"a": lambda _: None}, 3, clock=lambda: float(next(ticks)))
    assert timings["a"].median_s == 1.0
