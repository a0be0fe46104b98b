# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch

from polykv_vllm.errors import UnsupportedError
from polykv_vllm.formats import FORMATS, FormatSpec

FORMAT_LIST = list(FORMATS.values())


def spec(head_size: int = 64, dtype: torch.dtype = torch.uint8, **changes: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    shape = {"block_size": 32, "num_kv_heads": 3, "head_size": head_size}
    return FullAttentionSpec(**shape | changes, dtype=dtype)


@pytest.mark.parametrize("fmt", FORMAT_LIST, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_page_size_is_that_of_the_format(fmt: FormatSpec, head_size: int) -> None:
    from polykv_vllm.attention.backend import backend_class

    customized = backend_class(fmt).customize_spec(spec(head_size))
    assert customized.page_size_bytes == 32 * 3 * fmt.slot_bytes(head_size)


def test_published_bytes() -> None:
    from polykv_vllm.attention.backend import backend_class

    backend = backend_class(FORMATS["polykv_k8v3"])
    assert backend.customize_spec(spec(64)).state_content_size_bytes == 92
    assert backend.customize_spec(spec(128)).state_content_size_bytes == 180


def test_specs_of_skipped_layers_stay_as_they_are() -> None:
    from polykv_vllm.attention.backend import backend_class

    skipped = spec(dtype=torch.bfloat16)
    assert backend_class(FORMAT_LIST[0]).customize_spec(skipped) == skipped


def test_values_of_another_head_size_are_refused() -> None:
    from polykv_vllm.attention.backend import backend_class

    with pytest.raises(UnsupportedError, match="128 elements for keys and 64 for val"):
        backend_class(FORMAT_LIST[0]).customize_spec(spec(128, head_size_v=64))


@pytest.mark.parametrize("fmt", FORMAT_LIST, ids=lambda fmt: fmt.name)
def test_vllm_finds_the_class_by_its_path(fmt: FormatSpec) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from polykv_vllm.attention.backend import backend_class

    backend = backend_class(fmt)
    assert resolve_obj_by_qualname(".".join(backend.full_cls_name())) is backend
    assert AttentionBackendEnum[backend.get_name()]


@pytest.mark.parametrize(
    ("block_size", "served"), [(16, False), (32, True), (48, False), (128, True)]
)
def test_block_sizes(block_size: int, served: bool) -> None:
    from polykv_vllm.attention.backend import backend_class

    backend = backend_class(FORMAT_LIST[0])
    assert backend.supports_block_size(block_size) is served
