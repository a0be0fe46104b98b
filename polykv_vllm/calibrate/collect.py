# SPDX-License-Identifier: Apache-2.0
"""One forward pass over a calibration text that sums what a transform is made from.

transformers hands an attention function queries and keys after head norms and RoPE,
just what a cache sees. Ours adds them to the sums of the layer and computes attention
as ever.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from polykv_vllm.calibrate.shape import ModelShape, attention_modules
from polykv_vllm.calibrate.statistics import (
    HeadSums,
    Statistics,
    add_sequence,
    output_gram,
    output_rows,
)

IMPLEMENTATION = "polykv_calibrate"

_collector: "Collector | None" = None


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if _collector is not None:
        _collector.add(module, query, key, value, kwargs.get("scaling"))
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, **kwargs
    )
    return output


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, sdpa_mask)


class Collector:
    """Sums the statistics of a model's layers.

    Args:
        model: A causal language model of transformers.
        aware: Sum for WUSH-A, too: takes time that grows with the square of a
            sequence's length.

    """

    def __init__(self, model: Any, aware: bool = False) -> None:
        self._shape = ModelShape.of(model.config)
        modules = attention_modules(model)
        self._number = {id(module): index for index, module in enumerate(modules)}
        self._aware = aware
        heads, dim = self._shape.num_kv_heads, self._shape.head_dim
        self.statistics = Statistics([HeadSums.zeros(heads, dim) for _ in modules])
        self._rows = []
        for sums, module in zip(self.statistics.layers, modules, strict=True):
            weight = module.o_proj.weight.detach()
            sums.output += output_gram(weight, heads, dim)
            self._rows.append(output_rows(weight, heads, dim) if aware else None)

    def add(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
    ) -> None:
        """Add one layer's `[rows, heads, tokens, head_dim]` to its sums."""
        number = self._number[id(module)]
        scale = self._shape.head_dim**-0.5 if scale is None else scale
        for row in range(query.shape[0]):
            states = (query[row], key[row], value[row])
            sums = self.statistics.layers[number]
            add_sequence(sums, *states, scale, self._rows[number])


@contextmanager
def collecting(model: Any, collector: Collector) -> Iterator[None]:
    """Have a model's forward passes add to a collector."""
    global _collector
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    _collector = collector
    try:
        yield
    finally:
        _collector = None
        model.set_attn_implementation(before)


@torch.inference_mode()
def collect(
    model: Any,
    sequences: Sequence[Sequence[int]],
    aware: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Statistics:
    """Return the statistics of a model over sequences of tokens.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        sequences: Each read from an empty context.
        aware: Sum for WUSH-A, too.
        progress: Told the number of sequences that are done.

    """
    collector = Collector(model, aware)
    statistics = collector.statistics
    with collecting(model, collector):
        for tokens in sequences:
            model.base_model(torch.tensor([list(tokens)]), use_cache=False)
            statistics.sequences += 1
            statistics.tokens += len(tokens)
            statistics.aware_sequences += aware
            progress(statistics.sequences)
    return statistics
