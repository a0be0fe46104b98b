# SPDX-License-Identifier: Apache-2.0
"""From last hidden states to scores: fp32, the vocabulary in blocks.

Logits of an engine are rounded to bf16, a noise of up to 0.06 nats at 16; divergences
of a few thousandths drown in it. The hidden states are what the engine computed, so
they are multiplied with the head once more, in fp32. The products of bf16 numbers are
exact there; only their sum is rounded.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK_TOKENS = 8192  # of the vocabulary: 32 MiB of logits for 1,024 rows
_BLOCK_ROWS = 1024


@dataclass(frozen=True)
class Head:
    """What turns hidden states into logits.

    Attributes:
        weight: `[vocab_size, hidden_size]`, without padding, any float dtype.
        bias: `[vocab_size]` or None.
        scale: Factor of the logits, after the cap.
        soft_cap: Logits become `cap * tanh(logits / cap)`; None: they stay.

    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None

    def blocks(self, *hidden: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield the first token and the logits `[rows, tokens]` of each block.

        Args:
            hidden: Each `[rows, hidden_size]` fp32; the weights are read once for all.

        """
        # The states first: a whole head of fp32 need not be looked at then.
        is_bf16 = all(map(_is_bf16, (*hidden, self.weight)))
        for begin in range(0, self.weight.shape[0], _BLOCK_TOKENS):
            block = slice(begin, begin + _BLOCK_TOKENS)
            weight = self.weight[block].float().T
            bias = None if self.bias is None else self.bias[block].float()
            with _bf16_products() if is_bf16 else nullcontext():
                logits = [rows @ weight for rows in hidden]
            yield begin, [self._finish(each, bias) for each in logits]

    def _finish(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            logits += bias
        if self.soft_cap is not None:
            logits = logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits.mul_(self.scale) if self.scale != 1.0 else logits


def _is_bf16(numbers: Tensor) -> bool:
    """Whether bf16 holds all of them."""
    if numbers.dtype == torch.bfloat16:
        return True
    return torch.equal(numbers.bfloat16().to(numbers.dtype), numbers)


@contextmanager
def _bf16_products() -> Iterator[None]:
    """Let the CPU multiply numbers that are bf16 already as such, with fp32 sums.

    The result is the same; on a CPU with matrix units for bf16 it takes half the time.
    """
    precision = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = precision


class _Softmax:
    """Log-sum-exp, the likeliest token and the target's logit, block by block."""

    def __init__(self, targets: Tensor) -> None:
        self._targets = targets
        self.maximum = torch.full(targets.shape, -torch.inf)
        self.sum = torch.zeros(targets.shape)
        self.top = torch.zeros_like(targets)
        self.target_logit = torch.zeros(targets.shape)

    def add(self, begin: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Take in a block.

        Returns:
            `exp(logits - maximum)`, and the factor `[rows]` that brings sums over
            earlier blocks to the new maximum.

        """
        block_maximum, place = logits.max(dim=1)
        self.top = torch.where(block_maximum > self.maximum, place + begin, self.top)
        maximum = torch.maximum(self.maximum, block_maximum)
        factor = (self.maximum - maximum).exp()
        weights = (logits - maximum[:, None]).exp_()
        self.sum = self.sum * factor + weights.sum(dim=1)
        self.maximum = maximum
        inside = self._targets - begin
        is_here = (inside >= 0) & (inside < logits.shape[1])
        found = logits.gather(1, inside.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        self.target_logit = torch.where(is_here, found, self.target_logit)
        return weights, factor

    @property
    def log_sum(self) -> Tensor:
        """`[rows]` log of the sum of exp(logit)."""
        return self.maximum + self.sum.log()


@dataclass(frozen=True)
class Scores:
    """As `TokenScores`, in tensors.

    Attributes:
        nll: `[rows]` fp32, nats.
        kld: `[rows]` fp32, KL(reference || other), nats; None without a reference.
        agrees: `[rows]` bool; None without a reference.

    """

    nll: Tensor
    kld: Tensor | None
    agrees: Tensor | None


def score(
    hidden: Tensor, targets: Tensor, head: Head, reference: Tensor | None = None
) -> Scores:
    """Score tokens, and compare with another engine's prediction of them.

    Args:
        hidden: `[rows, hidden_size]`, last hidden states (after the final norm) of the
            positions before the targets.
        targets: `[rows]` int64, the tokens that followed.
        head: Of the model.
        reference: `[rows, hidden_size]`, the same of the reference.

    """
    parts = []
    for begin in range(0, len(targets), _BLOCK_ROWS):
        rows = slice(begin, begin + _BLOCK_ROWS)
        other = None if reference is None else reference[rows].float()
        parts.append(_score_rows(hidden[rows].float(), targets[rows], head, other))
    return Scores(
        torch.cat([part.nll for part in parts]),
        *(
            None if reference is None else torch.cat([getattr(p, name) for p in parts])
            for name in ("kld", "agrees")
        ),
    )


def _score_rows(
    hidden: Tensor, targets: Tensor, head: Head, reference: Tensor | None
) -> Scores:
    own = _Softmax(targets)
    if reference is None:
        for begin, (logits,) in head.blocks(hidden):
            own.add(begin, logits)
        return Scores(own.log_sum - own.target_logit, None, None)
    theirs = _Softmax(targets)
    # sum of p_reference * (logit_reference - logit); the log-sums come in at the end.
    difference = torch.zeros(targets.shape)
    for begin, (logits, their_logits) in head.blocks(hidden, reference):
        own.add(begin, logits)
        weights, factor = theirs.add(begin, their_logits)
        terms = weights.mul_(their_logits - logits)
        difference = difference * factor + terms.sum(dim=1)
    kld = difference / theirs.sum - theirs.log_sum + own.log_sum
    # The exact value is never negative; the rounded one is where both are the same.
    return Scores(
        own.log_sum - own.target_logit, kld.clamp_(min=0), own.top == theirs.top
    )
