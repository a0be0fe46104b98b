# SPDX-License-Identifier: Apache-2.0
"""The features: for each the engine that has it, and what that engine is asked.

The table is `GROUPS`. It is run inside the program (`program.py`), one engine after the
other. What is returned goes to the tests as JSON; each `Sequence` in it is scored by
its judge, an engine without the feature, first.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.features import requests
from tests.e2e.features.models import ADAPTERS
from tests.e2e.features.session import BLOCK_SIZE, Session

POOL_BLOCKS = 12
LONGEST = (POOL_BLOCKS - 1) * BLOCK_SIZE
"""Tokens that the smallest pool holds: one block of it is never used."""


@dataclass(frozen=True)
class Group:
    """One engine.

    Attributes:
        ask: Gets the session and the directory with the models; returns the results.
        model: Directory below that one.
        options: Of `vllm.LLM`, beyond `session.OPTIONS`.
        has_pool: Whether blocks are kept on disk, in a directory of its own.

    """

    ask: Callable[[Session, Path], dict[str, Any]] = requests.texts
    model: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    has_pool: bool = False

    def options_in(self, directory: Path) -> dict[str, Any]:
        """Return the options; what is kept on disk goes below the models."""
        if not self.has_pool:
            return self.options
        ours = self.options["additional_config"]["polykv"]
        pool = {"pool": {"path": str(directory / "pool")}}
        return self.options | {"additional_config": {"polykv": ours | pool}}


def drafts(num_tokens: int) -> dict[str, Any]:
    """Speculative decoding that proposes what followed the last words before."""
    lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    config = {"method": "ngram", "num_speculative_tokens": num_tokens} | lookup
    return {"speculative_config": config}


def skip(*entries: str) -> dict[str, Any]:
    return {"kv_cache_dtype_skip_layers": list(entries)}


# The scales of the keys come from the weights that are loaded, the model's without an
# adapter: an engine with the merged weights would have others, and other codes.
SAME_KEYS = {"additional_config": {"polykv": {"key_treatment": "hadamard"}}}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
COMPACT = {"backend": "xgrammar", "disable_any_whitespace": True}
REQUESTS = {"structured_outputs_config": COMPACT, "enable_prompt_embeds": True}
TINY = {"num_gpu_blocks_override": POOL_BLOCKS}
STOCK = {"kv_cache_dtype": "auto"}

GROUPS: dict[str, Group] = {
    "plain": Group(requests.plain),
    "stock": Group(requests.plain, options=STOCK),
    "no prefix caching": Group(options={"enable_prefix_caching": False}),
    "ngram 1": Group(requests.drafts, options=drafts(1)),
    "ngram 3": Group(requests.drafts, options=drafts(3)),
    "ngram 3, windows": Group(requests.drafts, "gemma", drafts(3)),
    "lora": Group(requests.adapters, options=LORA | SAME_KEYS),
    "lora, pool": Group(requests.reloaded, options=LORA | SAME_KEYS, has_pool=True),
    "requests": Group(requests.kinds, options=REQUESTS),
    "chunks": Group(requests.chunks),
    "preemption": Group(requests.preemption, options=TINY | {"max_model_len": 320}),
    "longest": Group(requests.longest, options=TINY | {"max_model_len": LONGEST}),
    "too long": Group(options=TINY | {"max_model_len": LONGEST + 1}),
    "skip by index": Group(requests.replayed, options=skip("1")),
    "skip windows": Group(requests.replayed, "gemma", skip("sliding_window")),
    "async, sleep": Group(requests.switched_off, options={"async_scheduling": True}),
    "sleep mode": Group(options={"enable_sleep_mode": True}),
}
"""In the order they run."""

JUDGES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "windows": ("gemma", {}),
    "stock": ("llama", STOCK),
    "base": ("llama", SAME_KEYS),
    **{adapter: (f"merged-{adapter}", SAME_KEYS) for adapter in ADAPTERS},
}
"""Engines without any feature: model and options."""
