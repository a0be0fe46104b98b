# SPDX-License-Identifier: Apache-2.0
"""Says which seams fit a vLLM that is not installed, from its Python files alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from polykv_vllm.seams.seam import Seam
from polykv_vllm.seams.source import SourceTree


@dataclass(frozen=True)
class Fit:
    """How a seam fits a vLLM that is not installed.

    Attributes:
        seam: The seam.
        fits: None where its target is not a part of vLLM.
        reason: Why not, or what was found.

    """

    seam: Seam
    fits: bool | None
    reason: str


def compare(seams: Sequence[Seam], tree: SourceTree) -> list[Fit]:
    """Compare what the seams expect with the Python files of a vLLM."""
    found = []
    for seam in seams:
        if not seam.target.startswith("vllm."):
            package = seam.target.split(".")[0]
            found.append(Fit(seam, None, f"its target is in {package}, not in vLLM"))
            continue
        try:
            fingerprint = seam.change.fingerprint_in(tree)
        except (LookupError, OSError, SyntaxError) as error:
            found.append(Fit(seam, False, f"{type(error).__name__}: {error}"))
            continue
        fits = fingerprint in seam.expected
        known = ", ".join(seam.expected)
        reason = "" if fits else f"found {fingerprint}, expected {known}"
        found.append(Fit(seam, fits, reason))
    return found
