# SPDX-License-Identifier: Apache-2.0
"""What a vLLM that was built with `patches/` calls: the seams, in its own source.

A patched vLLM needs this package. Its functions are wrapped when they are defined, by
the same code that the plugin would wrap them with; the plugin then finds them so.
"""

import importlib
from collections.abc import Callable
from typing import Any

from polykv_vllm.errors import SeamError


def polykv_seam(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator that puts a seam into a function of vLLM.

    Args:
        name: The seam's name, that of its module.

    Raises:
        SeamError: This version of polykv-vllm has no such seam.

    """
    # Not the registry: it would import more, here, where vLLM is half imported.
    try:
        seam = importlib.import_module(f"polykv_vllm.seams.{name}").SEAM
    except ModuleNotFoundError as error:
        raise SeamError(
            f"this vLLM was patched for a seam {name!r} that polykv-vllm does not have "
            "(any more): build it with the patches of the installed polykv-vllm"
        ) from error

    def decorate(original: Callable[..., Any]) -> Callable[..., Any]:
        replacement: Callable[..., Any] = seam.change.wrap(original, in_source=True)
        return replacement

    return decorate
