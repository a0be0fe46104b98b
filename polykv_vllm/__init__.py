# SPDX-License-Identifier: Apache-2.0
"""A compressed KV cache for vLLM 0.32, selected by ``--kv-cache-dtype polykv``.

Importing this package imports neither torch nor vLLM: the command line stays quick,
and the formats can be used on a machine that has neither.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("polykv-vllm")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"

__all__ = ["__version__"]
