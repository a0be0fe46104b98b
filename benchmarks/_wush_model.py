# SPDX-License-Identifier: Apache-2.0
"""A transformers model that attends to transformed and quantized keys and values.

For `benchmarks.wush` only. Everything is fp32, so that nothing but a quantizer's own
error is measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from polykv_vllm.calibrate.build import TransformName, Transforms
from polykv_vllm.calibrate.shape import attention_modules
from polykv_vllm.calibrate.transforms import inverse
from polykv_vllm.evaluate.scoring import Head
from polykv_vllm.formats import CODEBOOKS
from polykv_vllm.reference.lowbit import (
    QUANTIZERS,
    Quantized,
    Quantizer,
    quantizer,
)
from polykv_vllm.reference.quantize import quantize_rotated
from polykv_vllm.reference.windows import Windows, windowed_attention

GRID_QUANTIZERS: tuple[str, ...] = (*QUANTIZERS, "codebook")
_IMPLEMENTATION = "polykv_wush_study"
NOTHING = Windows(sink_tokens=1 << 30)
"""Every token is seen in full precision."""

_study: "StudyModel | None" = None


class LayerTransform:
    """One layer's transforms and their inverses, fp32.

    Args:
        key: `[num_kv_heads, head_dim, head_dim]`.
        value: Likewise.
        key_center: `[num_kv_heads, head_dim]`.

    """

    def __init__(
        self, key: torch.Tensor, value: torch.Tensor, key_center: torch.Tensor
    ) -> None:
        self.pairs = [(t.float(), inverse(t).float()) for t in (key, value)]
        self.key_center = key_center.float().unsqueeze(1)

    def restored(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        codecs: tuple[Quantizer, Quantizer],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as the cache gives them back, in their own basis.

        Args:
            key: `[num_kv_heads, tokens, head_dim]` fp32.
            value: Likewise.
            codecs: Of keys and values.

        """
        key, value = (
            codec.dequantize(codec.quantize(states @ forward.mT)) @ back.mT
            for states, (forward, back), codec in zip(
                (key - self.key_center, value), self.pairs, codecs, strict=True
            )
        )
        return key + self.key_center, value


@dataclass(frozen=True)
class Codebook:
    """What formats of two and three bits have: Lloyd-Max levels, the row's norm kept.

    Attributes:
        bits: Of a code.

    """

    bits: int
    scale_bits: int = 16

    def quantize(self, rows: torch.Tensor) -> Quantized:
        """Quantize `[..., head_dim]` fp32."""
        return quantize_rotated(rows, self.bits, rotated=False)

    def dequantize(self, quantized: Quantized) -> torch.Tensor:
        """Return `[..., head_dim]` fp32."""
        levels = torch.tensor(CODEBOOKS[self.bits].levels, dtype=torch.float32)
        return levels[quantized.codes.long()] * quantized.scale.float().unsqueeze(-1)


@dataclass(frozen=True)
class TransformSet:
    """Transforms of a row of the tables.

    Attributes:
        transform: One of `build.TRANSFORMS`.
        centers_keys: Whether the mean key is subtracted first.

    """

    transform: TransformName
    centers_keys: bool = False

    @property
    def name(self) -> str:
        """In tables and files."""
        return f"{self.transform}, centred" if self.centers_keys else self.transform


@dataclass(frozen=True)
class Variant:
    """A cell of the grid.

    Attributes:
        transforms: Of keys and values.
        quantizer: One of `GRID_QUANTIZERS`.
        bits: Of a code.

    """

    transforms: TransformSet
    quantizer: str
    bits: int

    @property
    def name(self) -> str:
        """In tables and files."""
        return f"{self.transforms.name}/{self.quantizer}/{self.bits}"

    @property
    def codecs(self) -> tuple[Quantizer, Quantizer]:
        """Of keys and values."""
        if self.quantizer == "codebook":
            return Codebook(self.bits), Codebook(self.bits)
        return (
            quantizer(self.quantizer, self.bits, "key"),
            quantizer(self.quantizer, self.bits, "value"),
        )


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if _study is None or query.shape[0] != 1:
        raise RuntimeError("the study's attention is for one sequence of its own model")
    states = (query[0].float(), key[0].float(), value[0].float())
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = _study.attend(module, states, scale, sliding_window)
    return output.transpose(0, 1)[None].to(query.dtype).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, sdpa_mask)


class StudyModel:
    """A model whose cache is simulated.

    Args:
        path: Directory of the model.
        sets: Transforms by what they are.

    """

    def __init__(self, path: str, sets: dict[TransformSet, Transforms]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=_IMPLEMENTATION
        ).eval()
        self.head = Head(self.model.get_output_embeddings().weight.detach())
        self.modules = attention_modules(self.model)
        self._number = {id(module): n for n, module in enumerate(self.modules)}
        self._layers = {
            name: [LayerTransform(*layer) for layer in zip(*each, strict=True)]
            for name, each in sets.items()
        }
        self.variants: list[Variant] = []
        self.windows = NOTHING
        self.errors: list[list[tuple[float, float]]] = []

    @torch.inference_mode()
    def hidden(
        self,
        tokens: tuple[int, ...],
        begin: int,
        variant: Variant | None,
        windows: Windows,
    ) -> torch.Tensor:
        """Return the states that predict `tokens[begin:]`, fp32."""
        variants = [] if variant is None else [variant]
        with self._set(variants, NOTHING if variant is None else windows):
            states = self.model.base_model(torch.tensor([tokens]), use_cache=False)
        return states.last_hidden_state[0, begin - 1 : -1].float()

    @torch.inference_mode()
    def layer_errors(
        self, tokens: tuple[int, ...], variants: list[Variant]
    ) -> list[list[tuple[float, float]]]:
        """Return, by layer and variant, the squared error of the layer's attention.

        Each layer gets the inputs of the model without quantization. No windows.

        Returns:
            For each layer and variant the squared norms of the error and of the exact
            output, after the output projection.

        """
        self.errors = [[] for _ in self.modules]
        with self._set(variants, Windows()):
            self._compares = True
            self.model.base_model(torch.tensor([tokens]), use_cache=False)
        return self.errors

    def attend(
        self,
        module: torch.nn.Module,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Compute one layer's attention `[num_heads, tokens, head_dim]`."""
        query, key, value = states
        number = self._number[id(module)]

        def attention(variant: Variant | None) -> torch.Tensor:
            if variant is None:
                pair, windows = (key, value), NOTHING
            else:
                layer = self._layers[variant.transforms][number]
                pair, windows = layer.restored(key, value, variant.codecs), self.windows
            return windowed_attention(
                query, key, value, pair, scale, windows, sliding_window
            )

        if not self._compares:
            return attention(self.variants[0] if self.variants else None)
        exact = attention(None)
        weight = self.modules[number].o_proj.weight.float()
        projected = exact.transpose(0, 1).flatten(1) @ weight.T
        for variant in self.variants:
            error = (attention(variant) - exact).transpose(0, 1).flatten(1) @ weight.T
            squares = (float(error.square().sum()), float(projected.square().sum()))
            self.errors[number].append(squares)
        return exact

    @contextmanager
    def _set(self, variants: list[Variant], windows: Windows) -> Iterator[None]:
        global _study
        _study, self.variants, self.windows = self, variants, windows
        self._compares = False
        try:
            yield
        finally:
            _study, self._compares = None, False
