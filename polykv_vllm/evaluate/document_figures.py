# SPDX-License-Identifier: Apache-2.0
"""From what an arm did with a document to its figures."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from polykv_vllm.evaluate.answers import (
    Agreement,
    agreement,
    repetition,
    summarize_repetition,
)
from polykv_vllm.evaluate.engine import Generation
from polykv_vllm.evaluate.statistics import bootstrap_mean, paired_difference, wilson

Items = Mapping[str, Mapping[str, Any]]
DOCUMENT, AGENTS = "document-", "agents-"


def document_figures(done: Items, reference: Items | None, seed: int) -> dict[str, Any]:
    """Return the figures of one arm for a JSON file.

    Args:
        done: Items of the arm by key.
        reference: Of the reference; None if the arm is the reference.
        seed: Of the intervals, which are over documents and over answers.

    """
    runs = {key: item for key, item in done.items() if key.startswith(AGENTS)}
    largest = runs[max(runs)]
    return {
        "continuations": _continuations(done, reference, seed),
        "agents": {
            str(item["agents"]): _run_figures(item)
            | _agreement_or_none(item, reference and reference.get(key), seed)
            for key, item in sorted(runs.items())
        },
        # The same questions in a larger batch, in the same arm: what changes without
        # any compression, for a linear layer may add up in another order there.
        "with_itself": {
            str(item["agents"]): compare_answers(item, largest, seed)
            for key, item in sorted(runs.items())
            if item is not largest
        },
    }


def _continuations(done: Items, reference: Items | None, seed: int) -> dict[str, Any]:
    keys = sorted(key for key in done if key.startswith(DOCUMENT))
    items = [done[key] for key in keys]
    nll = [item["nll"] for item in items]
    found: dict[str, Any] = {
        "documents": len(items),
        "tokens": sum(item["tokens"] for item in items),
        "ppl": bootstrap_mean(nll, seed).map(math.exp).as_dict(),
        "document_nll": nll,
        "seconds": sum(item["seconds"] for item in items),
    }
    if reference is None:
        return found
    theirs = [reference[key]["nll"] for key in keys]
    change = paired_difference(nll, theirs, seed).map(math.expm1)
    return found | {
        "ppl_change": change.as_dict(),
        "kld": bootstrap_mean([item["kld"] for item in items], seed).as_dict(),
        "top1": bootstrap_mean([item["top1"] for item in items], seed).as_dict(),
    }


def _run_figures(item: Mapping[str, Any]) -> dict[str, Any]:
    answers = answers_of(item)
    return {
        "answers": len(answers),
        "prompt_tokens": item["prompt_tokens"],
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
        "repetition": summarize_repetition([repetition(each) for each in answers]),
        "seconds": item["seconds"],
    }


def _agreement_or_none(
    item: Mapping[str, Any], reference: Mapping[str, Any] | None, seed: int
) -> dict[str, Any]:
    if reference is None:
        return {}
    return {"agreement": compare_answers(item, reference, seed)}


def compare_answers(
    item: Mapping[str, Any], reference: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Return how far the answers of two runs agree, question by question.

    Args:
        item: A run.
        reference: A run of at least as many agents.
        seed: Of the intervals.

    """
    pairs = zip(answers_of(item), answers_of(reference), strict=False)
    return summarize_agreement(
        [agreement(ours, theirs) for ours, theirs in pairs], seed
    )


def summarize_agreement(found: Sequence[Agreement], seed: int) -> dict[str, Any]:
    """Return shares and means over answers, with their intervals.

    Raises:
        ValueError: There are no answers.

    """
    exact = sum(each.exact for each in found)
    places = [
        each.first_difference for each in found if each.first_difference is not None
    ]
    return {
        "answers": len(found),
        "exact": exact,
        "exact_share": wilson(exact, len(found)).as_dict(),
        "token_f1": bootstrap_mean([e.token_f1 for e in found], seed).as_dict(),
        "chrf": bootstrap_mean([e.chrf for e in found], seed).as_dict(),
        "first_difference_median": statistics.median(places) if places else None,
        "length_ratio": statistics.fmean(each.length_ratio for each in found),
    }


def answers_of(item: Mapping[str, Any]) -> list[Generation]:
    """Return the answers of a run as they came from the engine."""
    return [
        Generation(
            tuple(answer["token_ids"]),
            answer["text"],
            answer["cached_tokens"],
            answer["finish_reason"],
        )
        for answer in item["answers"]
    ]
