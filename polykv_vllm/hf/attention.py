# SPDX-License-Identifier: Apache-2.0
"""The attention implementation "polykv" of transformers: reads the packed cache.

transformers hands an attention function the keys that the cache returned, not the
cache; `PackedLayer.update` marks them with its layer. Registered on import, by the two
public interfaces: one for attention, one for what a model makes of its mask.
"""

from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from polykv_vllm.errors import UnsupportedError
from polykv_vllm.hf.layer import IMPLEMENTATION, layer_of

_REFUSED = ("softcap", "position_bias", "s_aux", "head_mask")


def polykv_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to the packed cache.

    Args:
        module: The attention layer.
        query: `[rows, num_heads, new tokens, head_dim]`.
        key: What `PackedLayer.update` returned.
        value: Unused: the cache holds it.
        attention_mask: What `padding_mask` returned.
        scaling: Softmax scale; the default is `head_dim ** -0.5`.
        dropout: Must be 0.
        sliding_window: Keys that a query sees, itself included; None for all.
        is_causal: Must not be False.
        kwargs: Further arguments; those that change the result are refused.

    Returns:
        `[rows, new tokens, num_heads, head_dim]`, and no weights.

    Raises:
        UnsupportedError: The keys are not in a `PolyKVCache`, or something was asked
            for that the kernels do not compute.

    """
    layer = layer_of(key)
    if layer is None:
        raise UnsupportedError(
            f"the attention implementation {IMPLEMENTATION!r} reads a PolyKVCache, and "
            "this call has none: pass past_key_values=PolyKVCache.for_model(model), or "
            'choose another: model.set_attn_implementation("sdpa")'
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unsupported = {
        "dropout": dropout != 0,
        "attention that is not causal": not causal,
        "gradients": query.requires_grad,
        "attention weights as output": bool(kwargs.get("output_attentions")),
    }
    unsupported |= {name: kwargs.get(name) is not None for name in _REFUSED}
    if found := [name for name, is_used in unsupported.items() if is_used]:
        raise UnsupportedError(
            f"the polykv attention does not support {', '.join(found)}; it computes "
            "causal attention without gradients, full or with a sliding window"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = -1 if sliding_window is None else sliding_window
    return layer.attend(query, attention_mask, scale, window), None


def padding_mask(
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return a model's mask as `polykv_attention` takes it.

    Args:
        attention_mask: `[rows, tokens]` bool, zeros for padding; None without.
        allow_is_causal_skip: False where the model's mask is more than causal.
        kwargs: Sizes and offsets, which the cache knows itself.

    Returns:
        The mask if it has a zero, else None.

    Raises:
        UnsupportedError: The mask is not causal, with or without a window.

    """
    if not allow_is_causal_skip:
        raise UnsupportedError(
            "the polykv attention takes a causal mask, with or without a window and "
            "padding at the left; this model or call asks for another"
        )
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, polykv_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, padding_mask)
