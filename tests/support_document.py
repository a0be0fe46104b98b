# SPDX-License-Identifier: Apache-2.0
"""Writes docs/support.md from the table of families.

python -m tests.support_document > docs/support.md
"""

from collections.abc import Iterable

from polykv_vllm.architectures import ARCHITECTURES
from polykv_vllm.support import Support, check_model
from tests.families import REFUSED, SERVED, Family

_HEAD = """\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by `python -m tests.support_document`; a test compares. -->
# Supported models

`polykv check MODEL` says for any model what this page says for classes of models, from
the config alone; the engine asks the same table before it reads a weight. A class that
was not tested is refused by name.

## Served

Each row is a small model with random weights that `make test` starts on vLLM's engine,
on the CPU. Compared are, with chunked prefill and new tokens:

- every attention layer with the reference, on the same cached bytes;
- what was read in the weights, from which keys get their scales, with the keys and
  queries that transformers' module makes of random inputs ([keys.md](keys.md));
- a prefix hit with a miss: the same bits;
- log-probabilities with those over vLLM's own cache, within what the format loses;
- number, shape, window and cache bytes of the layers with what `polykv check` says.

Head sizes in a row were tried with that class; others that the formats have work the
same way.
"""
_REFUSED = """\
## Refused

What `polykv check` answers for a config of each kind:
"""
_LIMITS = """\
## What vLLM itself cannot run on the CPU

- *MPT* is no longer in vLLM.
- *Qwen3-Next*: vLLM's linear attention on the CPU takes bf16 only. Its states stay
  uncompressed, in pages of the size of the attention layers' pages: vLLM grows the
  block until it holds a state, and prefixes are shared in such blocks. Requests that
  arrive together may compute the same prefix twice (`single_copy` is off), and
  `--kv-cache-dtype-skip-layers` is refused.
- *Gemma 4*: vLLM gives all layers pages of one size, that of the largest. Where full
  layers have half the KV heads of twice the size, as in the row above, next to nothing
  is padded; with a quarter of the heads (16 of 256 beside 4 of 512) a page of a full
  layer is half empty. Checkpoints name the multimodal class; that vLLM's text class
  reads them (`--hf-overrides '{"architectures": ["Gemma4ForCausalLM"]}'`) was not
  tried. Models that share keys and values between layers (E2B, E4B) are refused.
- *Falcon*: vLLM makes its layers without a cache config, so that its own fp8 cache is
  ignored in silence. polykv hands the cache dtype over (`seams/layer_cache_dtype.py`).
- *Gemma 3 and 4, multimodal classes*: vLLM's CPU attention has no mask for images, and
  their modules need torchvision, whose builds on PyPI do not fit the CPU build of
  torch.
"""


def document() -> str:
    """Return the text of docs/support.md."""
    columns = ("class", "models", "heads / KV heads x size", "layers", "dtype")
    served = (
        _row(*columns, "format", "special"),
        "|---|---|---|---|---|---|---|",
        *map(_served_row, SERVED.values()),
    )
    refused = (
        "| class | example | answer |",
        "|---|---|---|",
        *(_refused_row(name, family) for name, family in REFUSED.items()),
    )
    return "\n".join((_HEAD, *served, "", _REFUSED, *refused, "", _LIMITS))


def _support(family: Family) -> Support:
    return check_model(family.config(), family.kv_cache_dtype)


def _served_row(family: Family) -> str:
    support = _support(family)
    return _row(
        f"`{family.architecture}`",
        ARCHITECTURES[family.architecture],
        " and ".join(
            f"{support.num_heads} / {shape.num_kv_heads} x {shape.head_size}"
            for shape in dict.fromkeys(support.layer_shapes)
        ),
        _layers(support),
        family.dtype,
        f"`{family.kv_cache_dtype.removeprefix('polykv_')}`",
        family.note,
    )


def _layers(support: Support) -> str:
    """Say how many layers of each kind there are."""
    num_full = support.num_layers - support.num_sliding_layers
    kinds = (
        (num_full, "full"),
        (support.num_sliding_layers, "sliding"),
        (support.num_linear_layers, "linear"),
    )
    return ", ".join(f"{count} {kind}" for count, kind in kinds if count)


def _refused_row(name: str, family: Family) -> str:
    reasons = "; ".join(_support(family).reasons)
    return _row(f"`{family.architecture}`", name, reasons.split("; served")[0])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def architectures(families: Iterable[Family]) -> set[str]:
    """Return the classes of some families."""
    return {family.architecture for family in families}


if __name__ == "__main__":
    print(document(), end="")
