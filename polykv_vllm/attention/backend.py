# SPDX-License-Identifier: Apache-2.0
"""Identity and capabilities of our attention backend, one class for each format.

The class carries the format because vLLM asks the class, not an instance, for the
page size (`customize_spec`), with a spec that does not name the cache dtype.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from polykv_vllm import ops
from polykv_vllm.attention.device import hardware_reasons, kernel_device
from polykv_vllm.attention.impl import PolyKVImpl
from polykv_vllm.attention.metadata import PolyKVMetadataBuilder
from polykv_vllm.errors import UnsupportedError
from polykv_vllm.formats import (
    CACHE_DTYPES,
    FORMATS,
    FormatSpec,
    get_format,
)

CACHE_TORCH_DTYPE = torch.uint8
BLOCK_SIZE_BASE = 32
"""Block sizes are multiples of this: two 16-token subtiles of the kernels."""


class PolyKVBackend(AttentionBackend):
    """Attention that stores and reads one of our formats.

    Cache of a layer: `[num_blocks, num_kv_heads, block_size, slot_bytes]` uint8; the
    bytes of one (block, KV head) are contiguous and belong to the format.
    """

    fmt: ClassVar[FormatSpec]

    # vLLM calls do_kv_cache_update before forward.
    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.bfloat16,
        torch.float16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """Return a member of vLLM's enum: it looks backends up by name."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PolyKVImpl]:
        """Return the class of a layer's implementation."""
        return PolyKVImpl

    @staticmethod
    def get_builder_cls() -> type[PolyKVMetadataBuilder]:
        """Return the class that prepares a batch."""
        return PolyKVMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: Any = None,
    ) -> list[int | MultipleOf]:
        """Return the block sizes that the kernels take, in tokens."""
        return [MultipleOf(BLOCK_SIZE_BASE)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the head sizes that the kernels take."""
        return list(cls.fmt.head_dims)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the one layout whose (block, KV head) tiles are contiguous."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Sliding windows are supported."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks are supported."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Work lists have the capacity that the host's query lengths ask for."""
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Set the bytes of one (token, KV head).

        A spec of another dtype is that of a layer kept out of quantization, which
        vLLM sizes with the same backend class: it stays as it is.

        Raises:
            UnsupportedError: Keys and values have heads of different sizes.

        """
        if spec.dtype != CACHE_TORCH_DTYPE:
            return spec
        if spec.head_size_v != spec.head_size:
            raise UnsupportedError(
                f"{cls.fmt.name} does not support heads of {spec.head_size} elements "
                f"for keys and {spec.head_size_v} for values; both must be the same "
                "(vLLM tells an implementation the first only)"
            )
        slot_bytes = cls.fmt.slot_bytes(spec.head_size)
        return replace(spec, state_content_bytes=slot_bytes)


def _define(fmt: FormatSpec) -> type[PolyKVBackend]:
    """Make the class of a format a global of this module: vLLM imports it by name."""
    name = "PolyKVBackend_" + fmt.name.removeprefix("polykv_")
    backend = type(name, (PolyKVBackend,), {"fmt": fmt, "__module__": __name__})
    globals()[name] = backend
    return backend


_BACKENDS = {name: _define(fmt) for name, fmt in FORMATS.items()}


def backend_class(fmt: FormatSpec) -> type[PolyKVBackend]:
    """Return the backend class of a format."""
    return _BACKENDS[fmt.name]


def select_backend(selected_backend: Any, selector_config: Any) -> type[PolyKVBackend]:
    """Return the backend class for a layer with one of our dtypes.

    Args:
        selected_backend: The backend that the user asked for, or None.
        selector_config: vLLM's `AttentionSelectorConfig` of the layer.

    Raises:
        UnsupportedError: The layer needs what the backend does not have.

    """
    fmt = get_format(selector_config.kv_cache_dtype)
    if selected_backend is not None and selected_backend.name != "CUSTOM":
        raise UnsupportedError(
            f"attention backend {selected_backend.name} cannot read the cache dtype "
            f"{selector_config.kv_cache_dtype}; leave --attention-backend away"
        )
    backend = backend_class(fmt)
    # Engines are asked before, as a whole; this is for layers that nobody asked about.
    invalid = []
    if kernel_device() == "cuda":
        invalid += ops.gpu_shape_reasons(fmt, selector_config.head_size, 1)
    invalid += hardware_reasons()
    invalid += backend.validate_configuration(
        **selector_config._asdict(), device_capability=None
    )
    if invalid:
        raise UnsupportedError(
            f"{selector_config.kv_cache_dtype} cannot serve an attention layer with "
            f"{selector_config!r}: {'; '.join(invalid)}. Head sizes: "
            f"{', '.join(map(str, fmt.head_dims))}; causal decoder attention."
        )
    return backend
