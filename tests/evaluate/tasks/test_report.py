# SPDX-License-Identifier: Apache-2.0
"""Figures and tables of a task, from records made by hand."""

from typing import Any

import pytest

from polykv_vllm.evaluate.tasks.figures import task_figures
from polykv_vllm.evaluate.tasks.items import Draft, Item, ItemSet
from polykv_vllm.evaluate.tasks.report import compare, compare_nll, task_report


def record(correct: bool, nll: float, group: str = "") -> dict[str, Any]:
    return {
        "correct": correct,
        "group": group,
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "tokens": 10,
        "repeated_share": 0.5,
        "loop_tokens": 6 if not correct else 0,
        "hit_limit": not correct,
        "answer_nll": nll,
        "seconds": 2.0,
    }


def figures(asked: int, *rows: dict[str, Any]) -> dict[str, Any]:
    found = ItemSet(
        asked, [Item(Draft(f"{n}", "", ()), (), ()) for n in range(len(rows))], ["x"]
    )
    done = {f"{n}": row for n, row in enumerate(rows)} | {"other": record(True, 9.0)}
    return task_figures(found, done, 64, seed=0)


BASE = figures(5, *(record(n < 3, 1.0, f"g{n % 2}") for n in range(4)))
ARM = figures(5, *(record(n in (0, 3), 1.5, f"g{n % 2}") for n in range(4)))


def as_records(**arms: dict[str, Any]) -> dict[str, Any]:
    return {
        arm: {"figures": each, "suite": "lines", "arm": arm}
        for arm, each in arms.items()
    }


def test_figures_by_hand() -> None:
    assert (BASE["asked"], BASE["scored"], BASE["correct"]) == (5, 4, 3)
    assert BASE["score"]["value"] == 0.75
    assert BASE["groups"] == {"g0": [2, 2], "g1": [1, 2]}
    assert (BASE["prompt_tokens"], BASE["cached_tokens"]) == (400, 160)
    assert BASE["repetition"]["stuck"] == 1
    assert BASE["seconds_per_item"] == 2.0
    assert BASE["answer_nll"]["value"] == 1.0
    assert set(BASE["items"]) == {"0", "1", "2", "3"}
    assert "answer_kld" not in BASE


def test_arms_are_compared_by_item() -> None:
    found = compare(ARM, BASE)
    assert found is not None
    assert (found.gained, found.lost) == (1, 2)
    assert found.difference.value == -0.25
    nll = compare_nll(ARM, BASE)
    assert nll is not None
    assert (nll.value, nll.low, nll.high) == (0.5, 0.5, 0.5)


def test_only_common_items_are_compared() -> None:
    less = BASE | {"items": {"0": BASE["items"]["0"], "9": BASE["items"]["1"]}}
    found = compare(ARM, less)
    assert found is not None
    assert (found.gained, found.lost, found.difference.value) == (0, 0, 0.0)
    assert compare(ARM, BASE | {"items": {}}) is None
    assert compare_nll(ARM, BASE | {"items": {}}) is None


def test_the_table_says_all_of_it() -> None:
    report = task_report(as_records(bf16=BASE, polykv=ARM))
    table, groups = report.tables
    first, second = (dict(zip(table.columns, row, strict=False)) for row in table.rows)
    assert (first["right"], first["score"], first["vs bf16"]) == ("3/4", "75%", "-")
    assert table.rows[1][:5] == ["polykv", "2/4", "50%", "15%..85%", "-25%"]
    assert second["won/lost (p)"] == "1/2 (1.00)"
    assert second["answer NLL"] == "1.500"
    assert (second["stuck"], second["from cache"]) == ("2/4", "40%")
    assert (second["length"], second["repeated %"], second["cut"]) == (
        "1.00",
        "50.0",
        "2/4",
    )
    assert groups.rows == [["bf16", "2/2", "1/2"], ["polykv", "1/2", "1/2"]]
    assert any("4 items scored of 5 asked; 1 longer" in note for note in report.notes)
    assert any("share 64 tokens, computed once; 160 of 400" in n for n in report.notes)
    assert table.markdown().startswith("### Task: lines")


def test_a_table_without_the_reference_has_no_differences() -> None:
    (table, _) = task_report(as_records(polykv=ARM)).tables
    assert table.rows[0][4:7] == ["-", "-", "-"]
    assert table.rows[0][table.columns.index("length")] == "-"


def test_no_records_make_no_table() -> None:
    assert task_report({}).tables == []


def test_nothing_scored_has_no_figures() -> None:
    with pytest.raises(ValueError, match="0 items"):
        figures(5)
