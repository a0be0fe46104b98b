# SPDX-License-Identifier: Apache-2.0
"""What a person reads at the end, and while it runs."""

from rich.console import Console

from polykv_vllm.demo import display
from polykv_vllm.demo.agents import Turn, Wave
from polykv_vllm.demo.result import Arm, CacheFigures, WaveFigures
from polykv_vllm.scrape import PrefixCounters

STOCK = CacheFigures("bfloat16", 2**28, 128, 23040, 11648, "bfloat16: computed")
OURS = CacheFigures("polykv", 2**28, 128, 8280, 32384, "polykv: reported")
WAVE = WaveFigures(8, 9361, PrefixCounters(9361, 8064), 1.5, 52.25)


def test_result_shows_every_figure() -> None:
    console = Console(width=80, record=True)
    display.print_result(console, STOCK, [Arm(OURS, (WAVE, WAVE))])
    text = console.export_text()
    for figure in ("23,040", "8,280", "11,648", "32,384", "2.78x", "256 MiB"):
        assert figure in text
    for figure in ("9,361", "8,064", "86.1%", "1.50 s", "52.2"):
        assert figure in text
    assert "bfloat16: computed" in text
    assert "polykv: reported" in text


def test_comparison_names_the_cache_of_each_wave() -> None:
    console = Console(width=80, record=True)
    display.print_result(console, STOCK, [Arm(STOCK, (WAVE,)), Arm(OURS, (WAVE,))])
    requests = console.export_text().partition("Requests")[2]
    assert "bfloat16" in requests
    assert "polykv" in requests


def test_long_answer_is_cut_at_a_word() -> None:
    turn = Turn("a", "q", answer="word " * 100)
    assert display.shorten(turn).endswith("word …")
    assert len(display.shorten(turn)) <= 150


def test_live_table_shows_markup_in_answers_as_it_is() -> None:
    console = Console(width=80, record=True)
    wave = Wave([Turn("a", "q", answer="[bold]not a tag"), Turn("b", "q")])
    console.print(display._live_table(wave, "wave 1", 80))
    text = console.export_text()
    assert "[bold]not a tag" in text
    assert "waiting for the first token" in text
