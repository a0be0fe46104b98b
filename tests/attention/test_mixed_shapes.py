# SPDX-License-Identifier: Apache-2.0
"""Case 12: layers of different shapes in one model share one pool of memory.

vLLM's own functions group the specs of the layers, as in the engine core; what they
allocate must hold every page, and no byte may be counted twice.
"""

from typing import Any

import pytest
import torch

from polykv_vllm.formats import FORMATS, FormatSpec

MEMORY_BYTES = 1 << 22
NAMED = pytest.mark.parametrize(
    "fmt",
    [fmt for fmt in FORMATS.values() if not fmt.is_low_bit],  # these have all sizes
    ids=lambda fmt: fmt.name,
)


def layers(fmt: FormatSpec, shapes: list[tuple[int, int, int | None]]) -> Any:
    """Return specs of layers of (KV heads, head size, window), as vLLM makes them."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from polykv_vllm.attention.backend import backend_class

    specs = {}
    for i, (num_kv_heads, head_size, window) in enumerate(shapes):
        common = {
            "block_size": 32,
            "num_kv_heads": num_kv_heads,
            "head_size": head_size,
            "dtype": torch.uint8,
        }
        spec = (
            FullAttentionSpec(**common)
            if window is None
            else SlidingWindowSpec(**common, sliding_window=window)
        )
        specs[f"model.layers.{i}.attn"] = backend_class(fmt).customize_spec(spec)
    return specs


@NAMED
@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 256, 64)] * 5 + [(2, 512, None)],
        [(4, 256, 512), (1, 512, None)] * 2,
        [(2, 64, 128), (2, 80, None)],
        [(3, 96, None), (2, 112, None)],
    ],
    ids=["256-512", "other-heads", "64-80", "full-only"],
)
def test_blocks_times_pages_are_what_is_allocated(
    fmt: FormatSpec, shapes: list[tuple[int, int, int | None]]
) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import KVCacheLayout, create_kv_cache_views

    specs = layers(fmt, shapes)
    config = VllmConfig()
    config.cache_config.kv_cache_layout = "LBHNC"
    with set_current_vllm_config(config):
        groups = kv_cache_utils.get_kv_cache_groups(config, specs)
        result = kv_cache_utils.get_kv_cache_config_from_groups(
            config, groups, MEMORY_BYTES
        )
    assert sorted(n for g in groups for n in g.layer_names) == sorted(specs)
    raw = torch.zeros(MEMORY_BYTES, dtype=torch.int8)
    by_name = {name: group for group in groups for name in group.layer_names}
    written: dict[int, int] = {}  # by group: bytes of all layers
    for tensor in result.kv_cache_tensors:
        group = by_name[tensor.layers[0]]
        spec = group.kv_cache_spec
        spec = getattr(spec, "kv_cache_specs", {tensor.layers[0]: spec})[
            tensor.layers[0]
        ]
        views = create_kv_cache_views(
            raw, spec, result.num_blocks, KVCacheLayout.LBHNC, tensor
        )
        for name, view in zip(tensor.layers, views, strict=True):
            own = specs[name]
            heads, slot_bytes = own.num_kv_heads, fmt.slot_bytes(own.head_size)
            assert view.shape == (result.num_blocks, heads, spec.block_size, slot_bytes)
            assert view.stride()[2:] == (slot_bytes, 1)  # the tile is contiguous
            assert not view.any()  # no layer of the group has these bytes
            view.fill_(1)
            written[id(group)] = written.get(id(group), 0) + view.numel()
        if tensor is result.kv_cache_tensors[-1] or (
            by_name[_next(result, tensor).layers[0]] is not group
        ):
            assert int(raw.sum()) == written[id(group)] <= tensor.size <= MEMORY_BYTES
            raw.zero_()  # the next group uses the same blocks, at other times
    assert result.num_blocks > 0


def _next(result: Any, tensor: Any) -> Any:
    return result.kv_cache_tensors[result.kv_cache_tensors.index(tensor) + 1]
