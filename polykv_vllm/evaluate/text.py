# SPDX-License-Identifier: Apache-2.0
"""From a text file to chunks of tokens, each read from an empty context."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polykv_vllm.evaluate.errors import EvalError


@dataclass(frozen=True)
class Cut:
    """How a text becomes chunks.

    Attributes:
        chunk_tokens: Tokens of a chunk, a beginning-of-sequence token included.
        stride: Tokens of the text from one chunk's start to the next one's; None: each
            token is in one chunk.
        score_from: First scored position of a chunk, 1..chunk_tokens - 1; None: the
            second half is scored, given the first.
        max_chunks: Most chunks; None: all.

    """

    chunk_tokens: int
    stride: int | None = None
    score_from: int | None = None
    max_chunks: int | None = None

    def __post_init__(self) -> None:
        if self.chunk_tokens < 2:
            raise EvalError(f"chunks of {self.chunk_tokens} token(s); at least 2")
        if not 0 < self.begin < self.chunk_tokens:
            raise EvalError(
                f"scoring from position {self.begin} of {self.chunk_tokens}: it must "
                f"lie in 1..{self.chunk_tokens - 1}, the first token is never predicted"
            )
        if self.stride is not None and self.stride < 1:
            raise EvalError(f"a stride of {self.stride} tokens; at least 1")
        if self.max_chunks is not None and self.max_chunks < 1:
            raise EvalError(f"{self.max_chunks} chunks asked for; at least 1")

    @property
    def begin(self) -> int:
        """First scored position."""
        return self.chunk_tokens // 2 if self.score_from is None else self.score_from


def load_tokenizer(model: str) -> Any:
    """Return the tokenizer of `model`, a directory or a hub name.

    Raises:
        EvalError: It has none, or it cannot be read.

    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # transformers raises almost any kind
        reason = str(error).strip().splitlines()
        raise EvalError(
            f"no tokenizer for {model}: a text cannot be scored without one "
            f"({reason[0] if reason else type(error).__name__})"
        ) from error


def leading_tokens(tokenizer: Any) -> list[int]:
    """Return what the tokenizer puts before a text: `[bos]`, or nothing."""
    ids = list(tokenizer("").input_ids)
    return ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        EvalError: There is no such file, it is empty, or no text.

    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise EvalError(f"text {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EvalError(f"text {path} is not UTF-8: {error}") from error
    if not text.strip():
        raise EvalError(f"text {path} is empty")
    return text


def digest(text: str) -> str:
    """Return a short name of `text`'s content."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tokenize(text: str, tokenizer: Any) -> list[int]:
    """Return the tokens of `text` alone, without what stands before or after it."""
    # `verbose` off: a whole file is longer than the model's context, which is fine.
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)
    return list(tokens.input_ids)


def cut_text(
    tokens: Sequence[int], leading: Sequence[int], cut: Cut
) -> list[tuple[int, ...]]:
    """Return the chunks; a last one that would be shorter is left out.

    Args:
        tokens: Of the text.
        leading: Put in front of every chunk: a model that was trained with a
            beginning-of-sequence token degenerates without it.
        cut: Sizes.

    Raises:
        EvalError: The text is shorter than one chunk.

    """
    own = cut.chunk_tokens - len(leading)
    if len(tokens) < own:
        raise EvalError(
            f"the text has {len(tokens):,} tokens, one chunk takes {own:,}: choose "
            f"--chunk-tokens {len(tokens) + len(leading)} or less, or a longer text"
        )
    starts = range(0, len(tokens) - own + 1, cut.stride or own)[: cut.max_chunks]
    return [(*leading, *tokens[start : start + own]) for start in starts]
