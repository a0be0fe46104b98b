# SPDX-License-Identifier: Apache-2.0
"""Sums over a calibration text: second moments of each KV head, in fp64.

Memory is bounded by the sums, whatever the length of the text. Only the direction of a
matrix counts later, so constants (2, 1/sqrt(head_dim)) are left out.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from polykv_vllm.calibrate.attention_aware import aware_sums


@dataclass
class HeadSums:
    """Sums of one layer, `[num_kv_heads, head_dim, head_dim]` fp64 but for the first.

    Attributes:
        key_total: Of k, after RoPE and head norms, `[num_kv_heads, head_dim]`.
        key: Of k k^T.
        query: Of q q^T, over the query heads of each KV head.
        value: Of v v^T.
        output: W W^T, W the rows of the output projection that read the KV head's
            values, summed over its query heads.
        value_drawn: Of w v v^T, w the attention that the token's key draws,
            k^T (sum q q^T) k, of mean 1 in every sequence (OSCAR).
        aware_query: Like `query`, each product weighted by what its error does to the
            layer's output (WUSH-A); zeros unless asked for.
        aware_output: Like `output`, weighted by the attention probabilities.

    """

    key_total: torch.Tensor
    key: torch.Tensor
    query: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    value_drawn: torch.Tensor
    aware_query: torch.Tensor
    aware_output: torch.Tensor

    @classmethod
    def zeros(cls, num_kv_heads: int, head_dim: int) -> "HeadSums":
        """Return sums over no tokens."""
        total = torch.zeros(num_kv_heads, head_dim, dtype=torch.float64)
        moments = len(SUMS) - 1
        shape = (num_kv_heads, head_dim, head_dim)
        return cls(
            total, *(torch.zeros(shape, dtype=torch.float64) for _ in range(moments))
        )


SUMS: tuple[str, ...] = tuple(HeadSums.__dataclass_fields__)


@dataclass
class Statistics:
    """Sums of all layers, and of how much text.

    Attributes:
        layers: In order.
        sequences: Sequences of the text.
        tokens: Tokens of all sequences.
        aware_sequences: Sequences that `aware_query` and `aware_output` are of.

    """

    layers: list[HeadSums] = field(default_factory=list)
    sequences: int = 0
    tokens: int = 0
    aware_sequences: int = 0

    def stacked(self, name: str) -> torch.Tensor:
        """Return `[num_layers, num_kv_heads, ...]` of one sum."""
        return torch.stack([getattr(layer, name) for layer in self.layers])

    def key_mean(self) -> torch.Tensor:
        """Return the mean key, `[num_layers, num_kv_heads, head_dim]` fp64."""
        return self.stacked("key_total") / max(self.tokens, 1)

    def centred_keys(self) -> torch.Tensor:
        """Return the sum of (k - mean) (k - mean)^T, shaped like `stacked("key")`."""
        total, mean = self.stacked("key_total"), self.key_mean()
        return self.stacked("key") - total.unsqueeze(-1) * mean.unsqueeze(-2)

    def save(self, path: Path) -> None:
        """Write a file that `load` reads."""
        counts = torch.tensor([self.sequences, self.tokens, self.aware_sequences])
        tensors = {name: self.stacked(name) for name in SUMS}
        save_file(tensors | {"counts": counts}, path)

    @classmethod
    def load(cls, path: Path) -> "Statistics":
        """Read what `save` wrote."""
        tensors = load_file(path)
        sums = zip(*(tensors[name] for name in SUMS), strict=True)
        return cls([HeadSums(*each) for each in sums], *tensors["counts"].tolist())

    def rank_deficient(self) -> list[tuple[int, int, str]]:
        """Return (layer, KV head, "key", "query" or "value") of sums without full rank.

        Too short a text leaves directions that no token had; damping makes the
        transform exist all the same, and those directions get the mean's share of it.
        """
        found = []
        for index, layer in enumerate(self.layers):
            for name in ("key", "query", "value"):
                matrix = getattr(layer, name)
                values = torch.linalg.eigvalsh(matrix)
                limit = values[:, -1:] * matrix.shape[-1] * 1e-14
                for head in (values[:, :1] <= limit).nonzero()[:, 0].tolist():
                    found.append((index, head, name))
        return found


def output_gram(weight: torch.Tensor, num_kv_heads: int, head_dim: int) -> torch.Tensor:
    """Return `HeadSums.output` of a projection `[hidden_size, heads * head_dim]`."""
    rows = output_rows(weight, num_kv_heads, head_dim)
    return (rows @ rows.mT).sum(1)


def output_rows(weight: torch.Tensor, num_kv_heads: int, head_dim: int) -> torch.Tensor:
    """Return the rows by query head, `[num_kv_heads, group, head_dim, hidden]`."""
    split = weight.double().view(weight.shape[0], num_kv_heads, -1, head_dim)
    return split.permute(1, 2, 3, 0)


def add_sequence(
    sums: HeadSums,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    output: torch.Tensor | None,
) -> None:
    """Add a sequence to a layer's sums.

    Args:
        sums: Of the layer; changed.
        query: `[num_heads, tokens, head_dim]` after RoPE.
        key: `[num_kv_heads, tokens, head_dim]` after RoPE.
        value: Like `key`.
        scale: Of the softmax.
        output: `[num_kv_heads, group, head_dim, hidden]`: add WUSH-A's sums, too.

    """
    num_kv_heads, _, head_dim = key.shape
    rows = query.double().reshape(num_kv_heads, -1, head_dim)
    key, value = key.double(), value.double()
    own = rows.mT @ rows
    sums.query += own
    sums.key_total += key.sum(1)
    sums.key += key.mT @ key
    sums.value += value.mT @ value
    drawn = ((key @ own) * key).sum(-1)
    drawn = drawn / drawn.mean(-1, keepdim=True).clamp(min=1e-300)
    sums.value_drawn += value.mT @ (value * drawn.unsqueeze(-1))
    if output is not None:
        grouped = query.reshape(num_kv_heads, -1, *query.shape[1:])
        for head in range(num_kv_heads):
            found = aware_sums(
                grouped[head], key[head], value[head], scale, output[head]
            )
            sums.aware_query[head] += found[0]
            sums.aware_output[head] += found[1]
