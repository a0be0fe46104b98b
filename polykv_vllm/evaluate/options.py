# SPDX-License-Identifier: Apache-2.0
"""What the command line says about the suites."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SuiteOptions:
    """Options of all suites; each takes its own.

    Attributes:
        text: File whose tokens are scored; None: the default text.
        chunk_tokens: Tokens of a chunk, the beginning-of-sequence token included.
        stride: Tokens from one chunk to the next; None: they do not overlap.
        score_from: First scored position of a chunk; None: its second half.
        max_chunks: Most chunks; None: as many as the text has.

    """

    text: Path | None = None
    chunk_tokens: int = 2048
    stride: int | None = None
    score_from: int | None = None
    max_chunks: int | None = None
