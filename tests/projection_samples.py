# SPDX-License-Identifier: Apache-2.0
"""What keys and queries look like when a layer of transformers' model makes them.

Random inputs go through the norm and the projection of transformers' own module, up to
its attention function. So mean and spread of each channel are known without a word
about how weights, gains and norms have to be put together.
"""

import re
from pathlib import Path
from typing import Any

import torch

_SAMPLES = 1 << 14
_BLOCK_LISTS = ("layers", "h")
_ATTENTIONS = ("self_attn", "self_attention", "attention")
_INPUT_NORMS = ("ln_attn", "input_layernorm")


class _Captured(Exception):
    """Carries query and key out of an attention module."""


def projection_errors(
    directory: Path, architecture: str, found: dict[str, Any]
) -> dict[str, float]:
    """Compare what an engine read in the weights with samples.

    Args:
        directory: Of the model.
        architecture: Its class in transformers.
        found: By the layer's name, the fields of a `KeyProjection`, as lists.

    Returns:
        The largest differences of biases and of spreads over all channels, in units of
        the spread. 16,384 samples know a mean to 0.8 % and a spread to 0.6 % (one
        standard deviation), hence the worst of some thousand channels to 3 %.

    """
    import transformers

    model_class = getattr(transformers, architecture)
    model = model_class.from_pretrained(directory, dtype=torch.float32).eval()
    transformers.AttentionInterface.register("polykv_samples", _capture)
    model.set_attn_implementation("polykv_samples")
    decoder = model.base_model
    blocks = next(getattr(decoder, n) for n in _BLOCK_LISTS if hasattr(decoder, n))
    errors = {"bias": 0.0, "spread": 0.0}
    torch.manual_seed(0)
    for name, projection in found.items():
        (index,) = re.findall(r"\.(\d+)\.", name)
        query, key = _samples(blocks[int(index)], model.config)
        for kind, rows in (("query", query), ("key", key)):
            bias, spread = (torch.tensor(projection[f"{kind}_{x}"]) for x in errors)
            assert rows.shape[1:] == bias.shape, (name, kind, rows.shape, bias.shape)
            bias_error = ((rows.mean(0) - bias) / spread).abs().max()
            spread_error = (rows.std(0) / spread - 1).abs().max()
            errors["bias"] = max(errors["bias"], float(bias_error))
            errors["spread"] = max(errors["spread"], float(spread_error))
    return errors


@torch.no_grad()
def _samples(block: Any, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[samples, heads, head_dim]` of queries and of keys."""
    attention = next(getattr(block, n) for n in _ATTENTIONS if hasattr(block, n))
    rows = torch.randn(1, _SAMPLES, config.hidden_size)
    for name in _INPUT_NORMS:
        if hasattr(block, name):
            rows = getattr(block, name)(rows)
            break
    if hasattr(attention, "_split_heads"):  # Falcon
        query, key, _ = attention._split_heads(attention.query_key_value(rows))
        if config.new_decoder_architecture:  # keys come once for each query head
            key = key[:, :, :: config.num_attention_heads // config.num_kv_heads]
        return query[0], key[0]
    if hasattr(attention, "_reshape"):  # BLOOM
        query, key, _ = attention._reshape(attention.query_key_value(rows))
        return query[0].transpose(0, 1), key[0].transpose(0, 1)
    no_rotation = (torch.ones(1, _SAMPLES, 1), torch.zeros(1, _SAMPLES, 1))
    try:
        attention(
            rows,
            position_embeddings=no_rotation,
            attention_mask=None,
            shared_kv_states={},  # of Gemma 4
        )
    except _Captured as captured:
        query, key = captured.args
        return query[0].transpose(0, 1), key[0].transpose(0, 1)
    raise AssertionError(f"{type(attention).__name__} calls no attention function")


def _capture(module: Any, query: Any, key: Any, *rest: Any, **options: Any) -> None:
    raise _Captured(query, key)
