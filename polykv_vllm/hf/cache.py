# SPDX-License-Identifier: Apache-2.0
"""A transformers cache whose keys and values stay packed."""

import weakref
from collections.abc import Sequence
from typing import Any, Self

import torch
from transformers.cache_utils import Cache

from polykv_vllm.errors import UnsupportedError
from polykv_vllm.formats import FormatSpec, get_format
from polykv_vllm.hf.blocks import BLOCK_SIZE, BlockStore
from polykv_vllm.hf.layer import PackedLayer
from polykv_vllm.hf.sequences import Sequences
from polykv_vllm.hf.treatment import AUTO, key_transforms
from polykv_vllm.keys import KeyTransform
from polykv_vllm.support import attention_reasons


class PolyKVCache(Cache):
    """Keys and values in one of our formats, on the CPU.

        model.set_attn_implementation("polykv")
        cache = PolyKVCache.for_model(model, "polykv")
        model.generate(**inputs, past_key_values=cache)

    With the attention implementation "polykv" the packed bytes are all there is. With
    any other the results are as right, but `update` dequantizes the whole context anew
    for every layer and token. Prefill attends to the packed tokens, too, so a result
    does not depend on which tokens came in which call.

    Args:
        config: The model's own config object: its attention implementation is looked up
            whenever keys are stored.
        fmt: Name of the format.
        key_transforms: How each layer treats its keys, None for a layer that does not;
            by default none does. `for_model` finds what the engine would do.
        block_size: Tokens per block, a multiple of 16.

    Raises:
        UnsupportedError: The model's attention or head size cannot be served.
        ValueError: There is no such format.

    """

    def __init__(
        self,
        config: Any,
        fmt: str = "polykv",
        *,
        key_transforms: Sequence[KeyTransform | None] | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        config = config.get_text_config(decoder=True)
        spec = get_format(fmt)
        num_layers, num_heads = config.num_hidden_layers, config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        _check(config, spec, head_dim, num_layers, key_transforms)
        store = BlockStore(spec, num_layers, num_kv_heads, head_dim, block_size)
        transforms = key_transforms or [None] * num_layers
        sequences = Sequences(store, num_heads // num_kv_heads)
        self._set_up(config, transforms, sequences, length=0)

    @classmethod
    def for_model(
        cls,
        model: Any,
        fmt: str = "polykv",
        *,
        key_treatment: str = AUTO,
        block_size: int = BLOCK_SIZE,
    ) -> Self:
        """Return an empty cache for a model.

        Args:
            model: A causal language model of transformers, on the CPU.
            fmt: Name of the format.
            key_treatment: One of `keys.TREATMENTS`, or "auto" for the one that the
                weights ask for.
            block_size: Tokens per block, a multiple of 16.

        Raises:
            UnsupportedError: The model cannot be served, or its weights, which are
                needed to choose a treatment, have other names.
            ValueError: There is no such format or treatment.

        """
        transforms = key_transforms(model, key_treatment)
        return cls(model.config, fmt, key_transforms=transforms, block_size=block_size)

    def _set_up(
        self,
        config: Any,
        transforms: Sequence[KeyTransform | None],
        sequences: Sequences,
        length: int,
    ) -> None:
        self._config, self._transforms = config, tuple(transforms)
        self.sequences, self.store = sequences, sequences.store
        layers = [
            PackedLayer(index, sequences, config, transform, length)
            for index, transform in enumerate(self._transforms)
        ]
        super().__init__(layers=layers)
        # Blocks go back to a pool's store when the cache is garbage.
        weakref.finalize(self, sequences.release)

    @property
    def fmt(self) -> FormatSpec:
        """The format."""
        return self.store.fmt

    @property
    def key_treatment(self) -> str:
        """What keys go through, one of `keys.TREATMENTS`."""
        return (self._transforms[0] or KeyTransform()).treatment

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first keys."""
        return len(self.sequences.tables) or -1

    def expect_padding(self, attention_mask: torch.Tensor) -> None:
        """Announce rows of different lengths: padding is never stored.

        To be called before the model is, for the first tokens and again for any later
        tokens with padding; `generate` needs it once.

        Args:
            attention_mask: `[rows, new tokens]`, zeros for padding, at the left.

        Raises:
            UnsupportedError: There is padding elsewhere, or a row is empty.

        """
        self.sequences.expect_padding(attention_mask)

    def fork(self, rows: int = 1) -> Self:
        """Return a cache of `rows` rows that go on from this one's only row.

        They share its blocks. Who writes into a shared block copies it before.

        Raises:
            ValueError: This cache has not one row, or has padding.

        """
        if self.batch_size != 1 or self.sequences.hidden(0, self.get_seq_length()):
            raise ValueError(
                f"only a cache of one row without padding is forked; this one has "
                f"{max(self.batch_size, 0)} row(s)"
            )
        forked = type(self).__new__(type(self))
        sequences = self.sequences.fork(rows)
        forked._set_up(self._config, self._transforms, sequences, self.get_seq_length())
        return forked

    def private_bytes(self) -> int:
        """Return the bytes of the blocks that nothing else holds."""
        return self.sequences.private_bytes()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row.

        Raises:
            ValueError: The number is positive, or larger than the cache.

        """
        length = self.get_seq_length() + tokens_to_remove
        if tokens_to_remove > 0 or length < 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, down to "
                f"{-self.get_seq_length()}, not {tokens_to_remove}"
            )
        self.sequences.crop(length)
        self._set_length(length)

    def reset(self) -> None:
        """Forget everything, the rows included."""
        self.sequences.reset()
        self._set_length(0)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row i go on from row `beam_idx[i]`."""
        self.sequences.select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        self.sequences.select(torch.arange(self.batch_size)[indices].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        rows = torch.arange(self.batch_size).repeat_interleave(repeats)
        self.sequences.select(rows.tolist())

    def _set_length(self, length: int) -> None:
        for layer in self.layers:
            layer.length = length


def _check(
    config: Any,
    fmt: FormatSpec,
    head_dim: int,
    num_layers: int,
    transforms: Sequence[KeyTransform | None] | None,
) -> None:
    """Raise UnsupportedError unless the kernels compute this model's attention."""
    reasons = list(attention_reasons(config))
    if getattr(config, "attn_logit_softcapping", None):
        reasons.append(
            "it caps attention logits (attn_logit_softcapping), which is served in vLLM"
        )
    if getattr(config, "num_kv_shared_layers", None):
        reasons.append("its layers share keys and values; each needs its own")
    try:
        fmt.check_head_dim(head_dim)
    except ValueError as error:
        reasons.append(str(error))
    if reasons:
        model = getattr(config, "model_type", "this model")
        raise UnsupportedError(f"{fmt.name} cannot hold {model}: {'; '.join(reasons)}")
    if transforms is not None and len(transforms) != num_layers:
        raise ValueError(f"{len(transforms)} key transforms for {num_layers} layers")
