# SPDX-License-Identifier: Apache-2.0
"""Tells an adapter from another one that was loaded from the same path.

vLLM knows an adapter by its name and its path: when its files are replaced and it is
loaded again, what the old one computed would be found under the same key. With the pool
the key has the digest of the files, too, in memory and on disk.

Between the replacement and the loading the files are not those that the engine computes
with, and nothing says when that ends. So an adapter whose files differ from those at
its first request, under one of vLLM's ids, shares nothing any more; loaded under a new
id, as after unloading it, it does.
"""

import logging
from pathlib import Path
from typing import Any

from polykv_vllm import envs
from polykv_vllm.pool.disk.weights import UnidentifiedError, files_digest, weight_files

logger = logging.getLogger("vllm.polykv")

_ATTRIBUTE = "_polykv_adapter"

_seen: dict[tuple[int, str], str] | None = None
"""The digest at the first request, by vLLM's id and the path; None: not in use."""


def watch() -> None:
    """Look at the files of adapters from now on, in this process."""
    global _seen
    _seen = {}


def forget() -> None:
    """Leave adapters to vLLM again."""
    global _seen
    _seen = None


def adapter_digest(request: Any) -> str | None:
    """Return the digest of the files of a request's adapter.

    Args:
        request: vLLM's, with an adapter. The answer to the first call is kept with it.

    Returns:
        None when it cannot be told what the adapter's weights are.

    """
    if not hasattr(request, _ATTRIBUTE):
        setattr(request, _ATTRIBUTE, _find_digest(request.lora_request))
    found: str | None = getattr(request, _ATTRIBUTE)
    return found


def key_part(request: Any) -> str | None:
    """Return what the key of a request's blocks has beside vLLM's; None: nothing."""
    if _seen is None or request.lora_request is None:
        return None
    return adapter_digest(request) or f"of request {request.request_id} alone"


def _find_digest(adapter: Any) -> str | None:
    directory = Path(adapter.lora_path)
    try:
        files = [*weight_files(directory), directory / "adapter_config.json"]
        digest = files_digest(files, envs.cache_dir() / "adapter-digests.json")
    except (OSError, UnidentifiedError) as error:
        logger.warning("Pool: adapter %s is not served: %s", adapter, error)
        return None
    seen = {} if _seen is None else _seen
    if seen.setdefault((adapter.lora_int_id, adapter.lora_path), digest) == digest:
        return digest
    logger.warning(
        "Pool: the files of adapter %s have changed since its first request; nothing "
        "of it is stored or found until it is unloaded and loaded again",
        adapter.lora_name,
    )
    return None
