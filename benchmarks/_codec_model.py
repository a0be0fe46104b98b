# SPDX-License-Identifier: Apache-2.0
"""A transformers model whose cache gives back quantized keys and values.

Every token is quantized, the newest ones too. Attention and what the cache gives back
are fp32, whatever the model computes in, so that the errors of a codec are not rounded
once more.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks._codec_variants import Variant
from polykv_vllm.evaluate.scoring import Head
from polykv_vllm.hf.projections import read_projections
from polykv_vllm.keys import TREATMENTS, KeyTransform, key_transform

_IMPLEMENTATION = "polykv_codec_study"
_QUANTILES = torch.tensor([0.05, 0.5, 0.95, 1.0])


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    group = query.shape[1] // key.shape[1]
    output = F.scaled_dot_product_attention(
        query.float(),
        key.float().repeat_interleave(group, 1),
        value.float().repeat_interleave(group, 1),
        attn_mask=attention_mask,
        is_causal=attention_mask is None,
        scale=scaling,
    )
    return output.transpose(1, 2).to(query.dtype).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, sdpa_mask)


class SimulatedCache(DynamicCache):
    """Gives back what a variant makes of the keys and values of one forward pass."""

    def __init__(self, variant: Variant | None, transforms: list[KeyTransform]) -> None:
        super().__init__()
        self._variant, self._transforms = variant, transforms
        self.value_rms: list[list[float]] = []
        """By layer: 5 %, 50 %, 95 % and 100 % quantiles of the rows' RMS, which is
        the standard deviation of the rotated values."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `[1, num_kv_heads, tokens, head_dim]` fp32, quantized."""
        key, value = key.float(), value.float()
        rms = value.square().mean(-1).sqrt().flatten()
        self.value_rms.append(rms.quantile(_QUANTILES).tolist())
        if self._variant is None:
            return key, value
        transform = self._transforms[layer_idx]
        rows = transform.keys(key[0].transpose(0, 1))
        restored = transform.restore_keys(self._variant.key(rows))
        return restored.transpose(0, 1)[None], self._variant.value(value)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Return 0: one forward pass, nothing before it."""
        return 0


class StudyModel:
    """A model, its head, and the key transforms of its layers.

    Args:
        path: Directory of the model.
        dtype: Of weights and activations.

    """

    def __init__(self, path: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=_IMPLEMENTATION
        ).eval()
        self.head = Head(self.model.get_output_embeddings().weight.detach())
        projections = read_projections(self.model)
        self._transforms = {
            treatment: [key_transform(treatment, each) for each in projections]
            for treatment in TREATMENTS
        }

    @torch.inference_mode()
    def hidden(
        self, tokens: tuple[int, ...], begin: int, variant: Variant | None
    ) -> tuple[torch.Tensor, list[list[float]]]:
        """Return the states that predict `tokens[begin:]`, and the rows' RMS."""
        treatment = "none" if variant is None else variant.treatment
        cache = SimulatedCache(variant, self._transforms[treatment])
        states = self.model.base_model(
            torch.tensor([tokens]), past_key_values=cache, use_cache=True
        ).last_hidden_state[0]
        return states[begin - 1 : -1].float(), cache.value_rms
