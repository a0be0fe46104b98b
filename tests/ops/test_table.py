# SPDX-License-Identifier: Apache-2.0
"""The capability table."""

import pytest
import torch

from polykv_vllm.ops.table import OPS, OpTable, validate_cache


def nothing() -> None:
    """Stand for an implementation."""


def test_look_up_and_order() -> None:
    table = OpTable()
    table.register("paged_attention", "cpu", "fast", nothing)
    table.register("paged_attention", "cuda", "sm90", print)
    table.register("paged_attention", "cpu", "slow", print)
    assert table.require("paged_attention", "cpu", "fast") is nothing
    assert table.require("paged_attention", "cuda", "sm90") is print
    assert table.isas("cpu") == ("fast", "slow")
    assert table.isas("cuda") == ("sm90",)
    assert table.isas("xpu") == ()


@pytest.mark.parametrize(("device", "isa"), [("cuda", "fast"), ("cpu", "sve")])
def test_missing_entry_names_what_exists(device: str, isa: str) -> None:
    table = OpTable()
    table.register("paged_attention", "cpu", "fast", nothing)
    table.register("reshape_and_cache", "cpu", "other", nothing)
    with pytest.raises(NotImplementedError) as error:
        table.require("paged_attention", device, isa, " of polykv_k8v3")
    text = str(error.value)
    for word in ("paged_attention of polykv_k8v3", device, isa, "cpu/fast"):
        assert word in text
    assert "cpu/other" not in text  # another op's


def test_empty_table_says_none() -> None:
    with pytest.raises(NotImplementedError, match="available: none"):
        OpTable().require("paged_attention", "cpu", "fast")


def test_double_registration_is_refused() -> None:
    table = OpTable()
    table.register("paged_attention", "cpu", "fast", nothing)
    with pytest.raises(ValueError, match=r"paged_attention.*already.*cpu/fast"):
        table.register("paged_attention", "cpu", "fast", print)
    assert table.require("paged_attention", "cpu", "fast") is nothing


def test_unknown_op_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        OpTable().register("attend", "cpu", "fast", nothing)
    for word in ("attend", *OPS):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (torch.zeros(2, 1, 32, 92), ["uint8", "torch.float32", "[2, 1, 32, 92]"]),
        (torch.zeros(2, 32, 92, dtype=torch.uint8), ["[2, 32, 92]", "slot_bytes"]),
        (torch.zeros(2, 1, 32, 93, dtype=torch.uint8), ["93", "92"]),
        (torch.zeros(2, 1, 32, 96, dtype=torch.uint8)[..., :92], ["contiguous"]),
        (torch.zeros(2, 1, 64, 92, dtype=torch.uint8)[:, :, ::2], ["contiguous"]),
        (torch.zeros(2, 1, 92, 32, dtype=torch.uint8).mT, ["contiguous"]),
    ],
    ids=["dtype", "dims", "bytes", "slot stride", "token stride", "transposed"],
)
def test_bad_cache(cache: torch.Tensor, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        validate_cache(cache.shape, cache.stride(), cache.dtype, 92)
    for word in words:
        assert word in str(error.value)


def test_cache_with_strides_between_tiles() -> None:
    cache = torch.zeros(4, 3, 2, 32, 92, dtype=torch.uint8)[::2, 1]
    validate_cache(cache.shape, cache.stride(), cache.dtype, 92)
