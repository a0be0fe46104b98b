# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM loads in every process (`vllm.general_plugins`)."""

import itertools
import sys
from collections.abc import Sequence


def register() -> None:
    """Make `--kv-cache-dtype polykv` available; may be called any number of times.

    An exception here stops every vllm command, so what can fail is only recorded, and
    raised when one of our dtypes is asked for: on the command line here, in Python
    code by the seam `engine_config`.

    Raises:
        SeamError: The command line asks for one of our dtypes and the installed vLLM
            is not the expected one.

    """
    from polykv_vllm.seams import registry

    registry.install()
    if registry.failure() is not None and _is_asked_for(sys.argv):
        registry.require()


def _is_asked_for(argv: Sequence[str]) -> bool:
    """Whether a command line has `--kv-cache-dtype` with one of our names."""
    from polykv_vllm.formats import is_polykv_dtype

    flags = ("--kv-cache-dtype", "--kv_cache_dtype")
    words = [word for argument in argv for word in argument.split("=", 1)]
    return any(
        flag in flags and is_polykv_dtype(value)
        for flag, value in itertools.pairwise(words)
    )
