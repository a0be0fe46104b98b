# SPDX-License-Identifier: Apache-2.0
"""The suite `perplexity`: how a text is predicted, beside the uncompressed model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from polykv_vllm.envs import data_dir
from polykv_vllm.evaluate import text
from polykv_vllm.evaluate.arms import REFERENCE, Arm
from polykv_vllm.evaluate.engine import Engine, ScoreRequest, TokenScores
from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.evaluate.options import SuiteOptions
from polykv_vllm.evaluate.perplexity_report import report
from polykv_vllm.evaluate.results import ItemLog, RunStore
from polykv_vllm.evaluate.statistics import (
    Interval,
    bootstrap_mean,
    paired_difference,
)
from polykv_vllm.evaluate.suite import Demand, Progress, Records, SuiteReport

_DEFAULT_TEXT = "wikitext2_test_raw.txt"
_SHIPPED_TEXT = Path(__file__).parents[1] / "demo" / "data" / "handbook.md"
_CHUNK_TOKENS, _SHIPPED_CHUNK_TOKENS = 2048, 256
_SEED = 0


class PerplexitySuite:
    """Scores chunks of a text: perplexity, divergence and top-1 agreement.

    Args:
        path: Of the text.
        cut: How it becomes chunks.

    Raises:
        EvalError: The text cannot be read.

    """

    name: ClassVar[str] = "perplexity"

    def __init__(self, path: Path, cut: text.Cut) -> None:
        self._path, self._cut = path, cut
        self._text = text.read_text(path)
        self._chunks: list[tuple[int, ...]] = []
        self._leading: list[int] = []

    @classmethod
    def from_options(cls, options: SuiteOptions) -> Self:
        """Take the text and how it is cut; see `Suite`."""
        path = options.text or default_text()
        is_shipped = path == _SHIPPED_TEXT
        default_tokens = _SHIPPED_CHUNK_TOKENS if is_shipped else _CHUNK_TOKENS
        cut = text.Cut(
            default_tokens if options.chunk_tokens is None else options.chunk_tokens,
            options.stride,
            options.score_from,
            options.max_chunks,
        )
        return cls(path, cut)

    def prepare(self, tokenizer: Any, context_tokens: int) -> Demand:
        """Cut the text into chunks; see `Suite`."""
        if self._cut.chunk_tokens > context_tokens:
            raise EvalError(
                f"chunks of {self._cut.chunk_tokens:,} tokens, the model takes "
                f"{context_tokens:,}: choose a smaller --chunk-tokens"
            )
        self._leading = text.leading_tokens(tokenizer)
        tokens = text.tokenize(self._text, tokenizer)
        self._chunks = text.cut_text(tokens, self._leading, self._cut)
        return Demand(self._cut.chunk_tokens, self._cut.chunk_tokens)

    def settings(self) -> dict[str, Any]:
        """Return what makes records comparable; see `Suite`."""
        return {
            "text": self._path.name,
            "text_digest": text.digest(self._text),
            "chunk_tokens": self._cut.chunk_tokens,
            "stride": self._cut.stride or self._cut.chunk_tokens - len(self._leading),
            "score_from": self._cut.begin,
            "chunks_asked": self._cut.max_chunks,
            "leading_tokens": self._leading,
        }

    def run(
        self, engine: Engine, arm: Arm, store: RunStore, progress: Progress
    ) -> dict[str, Any]:
        """Score what is not yet scored; return the figures of all chunks."""
        items = store.items(arm.name, self.name)
        requests = [
            ScoreRequest(f"{self.name}-{index:05}", tokens, self._cut.begin)
            for index, tokens in enumerate(self._chunks)
        ]
        todo = [request for request in requests if request.key not in items.done]
        progress(len(requests) - len(todo), len(requests))
        started = time.monotonic()
        for request, scores in zip(todo, engine.score(todo), strict=True):
            now = time.monotonic()
            items.add(request.key, _item(scores, now - started))
            started = now
            progress(len(items.done), len(requests))
        keys = [request.key for request in requests]
        reference = None if arm.is_reference else store.items(REFERENCE, self.name)
        return figures(keys, items, reference)

    @staticmethod
    def report(records: Records) -> SuiteReport:
        """Make tables and plots; see `Suite`."""
        return report(records)


def default_text() -> Path:
    """Return WikiText-2 of `POLYKV_DATA` if it is there, else the shipped text."""
    folder = data_dir()
    if folder is not None and (folder / _DEFAULT_TEXT).exists():
        return folder / _DEFAULT_TEXT
    return _SHIPPED_TEXT


def _item(scores: TokenScores, seconds: float) -> dict[str, Any]:
    """Return a chunk's scores for a JSON line; six digits are kept."""

    def short(values: Any) -> list[float] | None:
        return None if values is None else [float(f"{v:.6g}") for v in values]

    agrees = scores.agrees
    return {
        "nll": short(scores.nll),
        "kld": short(scores.kld),
        "agrees": None if agrees is None else [int(value) for value in agrees],
        "seconds": round(seconds, 3),
    }


def figures(
    keys: Sequence[str], items: ItemLog, reference: ItemLog | None
) -> dict[str, Any]:
    """Summarize an arm.

    All intervals are of resampled chunks: tokens of one chunk are not independent.

    Args:
        keys: Of the chunks, in order.
        items: The arm's.
        reference: The reference's; None if the arm is the reference.

    """
    chunks = [items.done[key] for key in keys]
    nll = _means(chunks, "nll")
    found: dict[str, Any] = {
        "chunks": len(chunks),
        "tokens": sum(len(chunk["nll"]) for chunk in chunks),
        "seconds_per_chunk": float(np.median([chunk["seconds"] for chunk in chunks])),
        "ppl": bootstrap_mean(nll, _SEED).map(np.exp).as_dict(),
        "chunk_nll": nll,
    }
    if reference is None:
        return found
    theirs = _means([reference.done[key] for key in keys], "nll")
    kld = np.concatenate([chunk["kld"] for chunk in chunks])
    return found | {
        "ppl_change": _change(paired_difference(nll, theirs, _SEED)).as_dict(),
        "kld": bootstrap_mean(_means(chunks, "kld"), _SEED).as_dict(),
        "kld_p99": float(np.quantile(kld, 0.99)),
        "kld_max": float(kld.max()),
        "top1": bootstrap_mean(_means(chunks, "agrees"), _SEED).as_dict(),
    }


def _means(chunks: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return each chunk's mean; chunks have equally many scored tokens."""
    return [float(np.mean(chunk[name])) for chunk in chunks]


def _change(difference: Interval) -> Interval:
    """From a difference of log-likelihoods to the relative change of perplexity."""
    return difference.map(lambda value: float(np.expm1(value)))
