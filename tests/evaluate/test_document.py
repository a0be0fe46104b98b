# SPDX-License-Identifier: Apache-2.0
"""The protocol of one document: its requests, figures and tables."""

import math
from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.evaluate.document import DocumentSuite
from polykv_vllm.evaluate.document_figures import document_figures
from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.evaluate.options import DocumentOptions, SuiteOptions
from tests.evaluate.byte_tokenizer import byte_tokenizer

pytest.importorskip("sacrebleu")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"Word {n:04d} " for n in range(400)))  # 4,000 bytes
    return path


def suite(text: Path | None, **options: Any) -> DocumentSuite:
    chosen = {"tokens": 1000, "agents": (1, 3), "answer_tokens": 10} | options
    document = DocumentOptions(document=text, **chosen)
    return DocumentSuite.from_options(SuiteOptions(document=document))


def test_documents_follow_each_other(text: Path) -> None:
    document = suite(text, documents=9)
    demand = document.prepare(byte_tokenizer(), 4096)
    tokenizer = byte_tokenizer()
    assert [len(each) for each in document._documents] == [1000] * 4
    second = tokenizer.decode(document._documents[1])
    # 999 tokens of text each: the second begins at the 999th.
    assert second == "<s>" + text.read_text()[999:1998]
    assert document.prefix_tokens == 640  # 5 blocks are the most below 700
    assert demand.num_seqs == 3


def test_agents_share_the_document(text: Path) -> None:
    document = suite(text)
    demand = document.prepare(byte_tokenizer(chat=True), 4096)
    prompts = document._prompts
    assert len(prompts) == 3
    assert all(p[: len(document._prefix)] == document._prefix for p in prompts)
    assert len(document._prefix) == 896  # "<s>[user]", 999 bytes: 7 blocks
    longest = max(map(len, prompts)) + 10
    assert demand.request_tokens == longest
    assert demand.live_tokens == longest + 3 * (longest - 896)


def test_a_plain_model_is_told_where_to_answer(text: Path) -> None:
    document = suite(text)
    document.prepare(byte_tokenizer(), 4096)
    assert byte_tokenizer().decode(document._prompts[0]).endswith("\n\nAnswer:")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": 5000}, "has 4,000 tokens, a document of 4,999"),
        ({"tokens": 3900}, "the model takes 3,000"),
        ({"agents": (0, 2)}, "at least one agent"),
        ({"agents": ()}, "at least one agent"),
        ({"agents": (99,)}, "99 agents ask"),
        ({"documents": 0}, "at least one document"),
        ({"tokens": 150, "prefix_share": 0.5}, "no prefix of whole blocks"),
        ({"tokens": 128, "prefix_share": 1.0}, "with a rest to score"),
    ],
)
def test_what_makes_no_sense_is_said(text: Path, options: dict, words: str) -> None:
    with pytest.raises(EvalError, match=words):
        suite(text, **options).prepare(byte_tokenizer(), 3000)


def test_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"none\.txt"):
        suite(tmp_path / "none.txt")


def answers(*texts: str, seconds: float = 1.0) -> dict[str, Any]:
    return {
        "agents": len(texts),
        "prompt_tokens": 1000 * len(texts),
        "seconds": seconds,
        "answers": [
            {
                "token_ids": [ord(letter) for letter in text],
                "text": text,
                "cached_tokens": 900,
                "finish_reason": "stop",
            }
            for text in texts
        ],
    }


BASE = {
    "document-000": {"tokens": 300, "nll": 2.0, "seconds": 1.0},
    "document-001": {"tokens": 300, "nll": 3.0, "seconds": 1.0},
    "agents-001": answers("one"),
    "agents-003": answers("one", "two", "cat"),
}
ARM = {
    "document-000": {"tokens": 300, "nll": 2.1, "kld": 0.1, "top1": 0.9, "seconds": 1},
    "document-001": {"tokens": 300, "nll": 3.1, "kld": 0.3, "top1": 0.7, "seconds": 1},
    "agents-001": answers("one"),
    "agents-003": answers("one", "two", "car"),
}


def test_figures_by_hand() -> None:
    found = document_figures(ARM, BASE, seed=0)
    rest = found["continuations"]
    assert (rest["documents"], rest["tokens"]) == (2, 600)
    assert rest["ppl"]["value"] == pytest.approx(math.exp(2.6))
    assert rest["ppl_change"]["value"] == pytest.approx(math.expm1(0.1))
    assert rest["kld"]["value"] == pytest.approx(0.2)
    assert rest["top1"]["value"] == pytest.approx(0.8)
    same = found["agents"]["3"]["agreement"]
    assert (same["exact"], same["answers"]) == (2, 3)
    assert same["token_f1"]["value"] == pytest.approx(2 / 3)
    assert same["first_difference_median"] == 2
    assert found["agents"]["1"]["agreement"]["first_difference_median"] is None
    assert found["agents"]["3"]["cached_tokens"] == 2700
    assert found["with_itself"]["1"]["exact"] == 1  # "one" both times
    assert list(found["with_itself"]) == ["1"]


def test_the_reference_is_compared_with_itself_only() -> None:
    found = document_figures(BASE, None, seed=0)
    assert "ppl_change" not in found["continuations"]
    assert "agreement" not in found["agents"]["3"]


def as_record(figures: dict[str, Any], arm: str, size: int) -> dict[str, Any]:
    more = {"documents_asked": 3, "shared_tokens": 896, "bytes_per_token": size}
    return {
        "arm": arm,
        "suite": "document",
        "bytes_per_token": size,
        "settings": {
            "text": "t.txt",
            "tokens": 1000,
            "prefix_tokens": 640,
            "answer_tokens": 10,
        },
        "figures": figures | more,
    }


def test_the_tables_say_both_comparisons_of_memory() -> None:
    report = DocumentSuite.report(
        {
            "bf16": as_record(document_figures(BASE, None, 0), "bf16", 23_040),
            "polykv": as_record(document_figures(ARM, BASE, 0), "polykv", 8_280),
        }
    )
    rest, agents, memory = report.tables
    assert rest.rows[0][:5] == ["bf16", "2", "600", "12.182", "-"]
    assert rest.rows[1][4] == "+10.52"
    assert [row[:3] for row in agents.rows] == [
        ["bf16", "1", "-"],
        ["bf16", "3", "-"],
        ["bf16 with itself", "1", "1/1"],
        ["polykv", "1", "1/1"],
        ["polykv", "3", "2/3"],
    ]
    assert {len(row) for row in agents.rows} == {len(agents.columns)}
    # 23,040 / 8,280; one copy beside 15: 1 - 8,280 / 345,600.
    assert memory.rows == [
        ["bf16", "23,040", "23.0", "1.00x smaller", "345.6", "93.3"],
        ["polykv", "8,280", "8.3", "2.78x smaller", "345.6", "97.6"],
    ]
    assert report.notes[0].startswith("document, bf16: 2 documents scored of 3 asked")


def test_without_the_reference_memory_has_no_comparison() -> None:
    records = {"polykv": as_record(document_figures(ARM, None, 0), "polykv", 8_280)}
    report = DocumentSuite.report(records)
    assert report.tables[2].rows == [["polykv", "8,280", "8.3", "-", "-", "-"]]
    assert DocumentSuite.report({}).tables == []
