# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch

from polykv_vllm.errors import UnsupportedError
from polykv_vllm.formats import CACHE_DTYPES, get_format

STOCK = "CPUAttentionBackend"


def route(kv_cache_dtype: str | None, backend: Any = None, **changes: Any) -> Any:
    from vllm.v1.attention import selector

    config = selector.AttentionSelectorConfig(
        head_size=64,
        dtype=torch.bfloat16,
        kv_cache_dtype=kv_cache_dtype,
        block_size=128,
    )
    return selector._cached_get_attn_backend(backend, config._replace(**changes), 9)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_our_dtypes_get_the_class_of_their_format(name: str) -> None:
    assert route(name).fmt == get_format(name)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["auto", "fp8", None])
def test_other_dtypes_keep_the_backend_of_vllm(name: str | None) -> None:
    assert route(name).__name__ == STOCK


@pytest.mark.usefixtures("installed")
def test_mla_of_vllm_is_untouched() -> None:
    assert "mla" in route("auto", use_mla=True).__module__


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 48}, "head_size not supported.*64, 80, 96"),
        ({"use_mla": True}, "MLA not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"use_mm_prefix": True}, "full attention not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"block_size": 16}, "block_size not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"dtype": torch.float64}, "dtype not supported"),
    ],
)
def test_layers_out_of_reach_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        route("polykv", **changes)


@pytest.mark.usefixtures("installed")
def test_sinks_are_served() -> None:
    assert route("polykv", has_sink=True) is route("polykv")


@pytest.mark.usefixtures("installed")
def test_a_requested_backend_is_not_ignored() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    with pytest.raises(UnsupportedError, match="CPU_ATTN cannot read"):
        route("polykv", AttentionBackendEnum.CPU_ATTN)


@pytest.mark.usefixtures("installed")
def test_sliding_windows_are_served() -> None:
    assert route("polykv", has_sliding_window=True, head_size=256) is route("polykv")
