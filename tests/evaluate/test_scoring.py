# SPDX-License-Identifier: Apache-2.0
"""Scores in blocks, compared with torch's softmax over whole rows in fp64."""

import pytest
import torch

from polykv_vllm.evaluate import scoring
from polykv_vllm.evaluate.scoring import Head, score

ROWS, HIDDEN, VOCAB = 37, 48, 1000


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in both directions, the last ones not full."""
    monkeypatch.setattr(scoring, "_BLOCK_TOKENS", 384)
    monkeypatch.setattr(scoring, "_BLOCK_ROWS", 16)


def naive_logprobs(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    logits = hidden.double() @ head.weight.double().T
    if head.bias is not None:
        logits = logits + head.bias.double()
    if head.soft_cap is not None:
        logits = head.soft_cap * torch.tanh(logits / head.soft_cap)
    return torch.log_softmax(logits * head.scale, dim=1)


HEADS = {
    "plain": Head(torch.randn(VOCAB, HIDDEN, generator=torch.Generator())),
    "capped": Head(torch.randn(VOCAB, HIDDEN), soft_cap=5.0),
    "scaled and biased": Head(
        torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB), scale=0.25
    ),
    "bf16": Head(torch.randn(VOCAB, HIDDEN).bfloat16()),
}


@pytest.mark.parametrize("name", HEADS)
def test_scores_are_those_of_whole_rows(name: str) -> None:
    head = HEADS[name]
    hidden = torch.randn(ROWS, HIDDEN).bfloat16()
    reference = (hidden + 0.05 * torch.randn(ROWS, HIDDEN)).bfloat16()
    targets = torch.randint(VOCAB, (ROWS,))
    scores = score(hidden, targets, head, reference)
    own, theirs = naive_logprobs(hidden, head), naive_logprobs(reference, head)
    nll = -own.gather(1, targets[:, None])[:, 0]
    kld = (theirs.exp() * (theirs - own)).sum(dim=1)
    # fp32 sums of 48 products of size ~7: 48 * 2^-24 * 7 each, a thousand of them
    # averaged by the softmax.
    torch.testing.assert_close(scores.nll.double(), nll, rtol=1e-5, atol=3e-5)
    assert scores.kld is not None and scores.agrees is not None
    torch.testing.assert_close(scores.kld.double(), kld, rtol=1e-4, atol=3e-5)
    assert scores.kld.max() > 1e-3, "nothing to tell apart"
    assert torch.equal(scores.agrees, own.argmax(1) == theirs.argmax(1))


def test_the_same_states_diverge_by_nothing() -> None:
    hidden = torch.randn(ROWS, HIDDEN)
    targets = torch.randint(VOCAB, (ROWS,))
    scores = score(hidden, targets, HEADS["plain"], hidden)
    assert scores.kld is not None and scores.agrees is not None
    assert 0 <= scores.kld.max() < 1e-5
    assert scores.agrees.all()


def test_without_a_reference_there_is_only_the_likelihood() -> None:
    hidden = torch.randn(ROWS, HIDDEN)
    targets = torch.randint(VOCAB, (ROWS,))
    alone = score(hidden, targets, HEADS["plain"])
    assert alone.kld is None and alone.agrees is None
    assert torch.equal(alone.nll, score(hidden, targets, HEADS["plain"], hidden).nll)


def test_far_logits_do_not_overflow() -> None:
    head = Head(100 * torch.randn(VOCAB, HIDDEN))
    hidden = torch.randn(ROWS, HIDDEN)
    targets = torch.randint(VOCAB, (ROWS,))
    scores = score(hidden, targets, head, -hidden)
    assert scores.kld is not None
    assert scores.nll.isfinite().all() and scores.kld.isfinite().all()
