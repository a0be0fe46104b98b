# SPDX-License-Identifier: Apache-2.0
"""What a suite asks of an engine: score given tokens, and generate.

An engine serves one arm: a model with one cache format. The arm that the others are
compared with keeps its last hidden states by request key, and the others turn them
into logits with the same head, so that the divergence is over the whole vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class ScoreRequest:
    """Tokens whose prediction is to be scored.

    Attributes:
        key: Names the request in all arms; also a file name.
        token_ids: The whole sequence, the beginning-of-sequence token included.
        begin: First position that is predicted and scored; at least 1.
        cached_tokens: Leading tokens that an earlier request has brought into the
            cache: read from there, not computed again. 0: nothing is read.

    """

    key: str
    token_ids: tuple[int, ...]
    begin: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class TokenScores:
    """Scores of positions begin..end of a request.

    Attributes:
        nll: `[num_scored]` fp32, negative log-likelihood of the given token, nats.
        kld: `[num_scored]` fp32, KL(reference || arm) over the vocabulary, nats; None
            in the reference arm.
        agrees: `[num_scored]` bool, whether both arms hold the same token for the
            most likely; None in the reference arm.

    """

    nll: np.ndarray[Any, Any]
    kld: np.ndarray[Any, Any] | None
    agrees: np.ndarray[Any, Any] | None


@dataclass(frozen=True)
class Generation:
    """One greedy answer.

    Attributes:
        token_ids: Generated tokens.
        text: The same, decoded, special tokens left out.
        cached_tokens: Prompt tokens read from the prefix cache.
        finish_reason: "stop" or "length".

    """

    token_ids: tuple[int, ...]
    text: str
    cached_tokens: int
    finish_reason: str


class Engine(Protocol):
    """A model with one cache format, ready to answer."""

    tokenizer: Any
    bytes_per_token: int

    def score(self, requests: Sequence[ScoreRequest]) -> Iterator[TokenScores]:
        """Yield the scores of each request, in order, as they are computed."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        stop: Sequence[str] = (),
    ) -> list[Generation]:
        """Answer prompts greedily, all of them in one batch."""

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""

    def close(self) -> None:
        """End the engine."""
