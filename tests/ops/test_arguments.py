# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments raise before a pointer is followed, and name what was wrong.

Each case changes one argument of a call that works. Without its check a case
would read or write out of bounds.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from polykv_vllm import ops
from polykv_vllm.formats import FORMATS
from tests.kernel_cases import CPP_ISAS

FMT = FORMATS["polykv_k8v3"]


def int32(*numbers: Any) -> torch.Tensor:
    """Return an int32 tensor."""
    return torch.tensor(numbers, dtype=torch.int32)


def store_arguments() -> dict[str, Any]:
    """Three tokens, two KV heads, four blocks of 32."""
    return {
        "key": torch.zeros(3, 2, 64),
        "value": torch.zeros(3, 2, 64),
        "kv_cache": torch.zeros(4, 2, 32, 92, dtype=torch.uint8),
        "slot_mapping": torch.tensor([0, 64, -1]),
        "fmt": FMT,
    }


def attention_arguments() -> dict[str, Any]:
    """Two requests: 2 query tokens over 40, 1 over 7; four heads."""
    return {
        "query": torch.zeros(3, 4, 64),
        "kv_cache": torch.zeros(4, 2, 32, 92, dtype=torch.uint8),
        "output": torch.zeros(3, 4, 64),
        "block_table": int32([0, 1], [2, 99]),
        "seq_lens": int32(40, 7),
        "query_start_loc": int32(0, 2, 3),
        "fmt": FMT,
        "scale": 0.125,
    }


def check(op: Any, arguments: dict[str, Any], words: list[str], isa: str) -> None:
    """Expect a ValueError that holds all of `words`."""
    with pytest.raises(ValueError) as error:
        op(**arguments, isa=isa)
    for word in words:
        assert word in str(error.value)


UINT8 = {"dtype": torch.uint8}

STORE = {
    "key dtype": ({"key": torch.zeros(3, 2, 64).double()}, ["key", "float64"]),
    "key dims": ({"key": torch.zeros(3, 64)}, ["key", "2, 64", "[3, 64]"]),
    "two dtypes": ({"value": torch.zeros(3, 2, 64).half()}, ["float32", "float16"]),
    "value heads": ({"value": torch.zeros(3, 1, 64)}, ["value", "[3, 1, 64]", "2, 64"]),
    "key heads": ({"key": torch.zeros(3, 4, 64)}, ["key", "[3, 4, 64]", "2, 64"]),
    "value size": ({"value": torch.zeros(3, 2, 128)}, ["value", "[3, 2, 128]"]),
    "head size": (
        {"key": torch.zeros(3, 2, 72), "value": torch.zeros(3, 2, 72)},
        ["head size 72", "64, 80, 96"],
    ),
    "key stride": ({"key": torch.zeros(3, 2, 128)[..., ::2]}, ["key", "(256, 128, 2)"]),
    "few keys": ({"key": torch.zeros(2, 2, 64)}, ["3 slots", "2 keys"]),
    "few values": ({"value": torch.zeros(1, 2, 64)}, ["3 slots", "1 values"]),
    "slot": ({"slot_mapping": torch.tensor([0, 128, 1])}, ["slot 128", "token 1"]),
    "far slot": ({"slot_mapping": torch.tensor([2**62, 0])}, [str(2**62), "128"]),
    "float slots": ({"slot_mapping": torch.zeros(3)}, ["slot_mapping", "float32"]),
    "bool slots": ({"slot_mapping": torch.ones(3).bool()}, ["slot_mapping", "bool"]),
    "2-D slots": ({"slot_mapping": torch.zeros(1, 3).long()}, ["[1, 3]"]),
    "slot stride": ({"slot_mapping": torch.zeros(6).long()[::2]}, ["contiguous"]),
    "cache dtype": (
        {"kv_cache": torch.zeros(4, 2, 32, 92, dtype=torch.int8)},
        ["kv_cache", "int8"],
    ),
    "cache bytes": ({"kv_cache": torch.zeros(4, 2, 32, 132, **UINT8)}, ["132", "92"]),
    "cache dims": ({"kv_cache": torch.zeros(4, 2, 32 * 92, **UINT8)}, ["kv_cache"]),
    "block size": ({"kv_cache": torch.zeros(4, 2, 24, 92, **UINT8)}, ["24", "16"]),
    "tiles": (
        {"kv_cache": torch.zeros(4, 32, 2, 92, **UINT8).transpose(1, 2)},
        ["contiguous"],
    ),
    "cache device": (
        {"kv_cache": torch.zeros(4, 2, 32, 92, device="meta", **UINT8)},
        ["kv_cache", "meta"],
    ),
    "value device": ({"value": torch.zeros(3, 2, 64, device="meta")}, ["meta"]),
}

ATTENTION = {
    "query dims": ({"query": torch.zeros(3, 256)}, ["query", "num_heads", "[3, 256]"]),
    "query dtype": ({"query": torch.zeros(3, 4, 64).int()}, ["query", "int32"]),
    "two dtypes": ({"output": torch.zeros(3, 4, 64).half()}, ["float32", "float16"]),
    "output heads": ({"output": torch.zeros(3, 2, 64)}, ["output", "[3, 2, 64]"]),
    "output stride": ({"output": torch.zeros(3, 4, 128)[..., ::2]}, ["output"]),
    "head size": ({"query": torch.zeros(3, 4, 72)}, ["head size 72", "64, 80, 96"]),
    "heads": (
        {"query": torch.zeros(3, 3, 64), "output": torch.zeros(3, 3, 64)},
        ["3 query heads", "2 KV heads"],
    ),
    "few queries": ({"query": torch.zeros(2, 4, 64)}, ["query_start_loc", "2..3", "2"]),
    "few outputs": ({"output": torch.zeros(2, 4, 64)}, ["query_start_loc", "2..3"]),
    "negative start": ({"query_start_loc": int32(-1, 1, 2)}, ["-1..1"]),
    "falling starts": ({"query_start_loc": int32(0, 2, 1)}, ["request 1", "2..1"]),
    "starts": ({"query_start_loc": int32(0, 3)}, ["2 requests", "2 query offsets"]),
    "long query": ({"seq_lens": int32(1, 7)}, ["request 0", "2 query", "1 cached"]),
    "negative length": ({"seq_lens": int32(40, -7)}, ["request 1", "-7"]),
    "long sequence": ({"seq_lens": int32(65, 7)}, ["request 0", "65", "2 blocks"]),
    "block": ({"block_table": int32([0, 4], [2, 0])}, ["block 4", "request 0", "4"]),
    "negative block": ({"block_table": int32([0, 1], [-1, 0])}, ["block -1"]),
    "few tables": ({"block_table": int32([0, 1])}, ["2 requests", "1 block table"]),
    "1-D table": ({"block_table": int32(0, 1)}, ["block_table", "[2]"]),
    "table dtype": (
        {"block_table": torch.zeros(2, 2).long()},
        ["block_table", "int32", "int64"],
    ),
    "table stride": ({"block_table": int32([0, 1], [2, 3]).T}, ["block_table"]),
    "length dtype": ({"seq_lens": torch.ones(2).long()}, ["seq_lens", "int64"]),
    "length dims": ({"seq_lens": int32([40, 7])}, ["seq_lens", "[1, 2]"]),
    "length stride": ({"seq_lens": int32(40, 1, 7, 1)[::2]}, ["seq_lens"]),
    "start dtype": ({"query_start_loc": torch.arange(3)}, ["query_start_loc"]),
    "cache bytes": ({"kv_cache": torch.zeros(4, 2, 32, 180, **UINT8)}, ["180", "92"]),
    "nan scale": ({"scale": float("nan")}, ["scale", "nan"]),
    "zero scale": ({"scale": 0.0}, ["scale", "0.0"]),
    "negative scale": ({"scale": -0.125}, ["scale", "-0.125"]),
    "zero window": ({"sliding_window": 0}, ["sliding_window", "0"]),
    "window": ({"sliding_window": -2}, ["sliding_window", "-2"]),
}


@pytest.mark.parametrize("isa", CPP_ISAS)
@pytest.mark.parametrize("case", STORE)
def test_store_refuses(case: str, isa: str) -> None:
    changes, words = STORE[case]
    arguments = store_arguments() | changes
    before = arguments["kv_cache"]
    check(ops.reshape_and_cache, arguments, words, isa)
    assert before.device.type == "meta" or not before.any()


@pytest.mark.parametrize("isa", CPP_ISAS)
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_refuses(case: str, isa: str) -> None:
    changes, words = ATTENTION[case]
    arguments = attention_arguments() | changes
    arguments["output"].fill_(42)
    check(ops.paged_attention, arguments, words, isa)
    assert (arguments["output"] == 42).all()


@pytest.mark.parametrize("isa", ops.available_isas())
def test_the_unchanged_calls_work(isa: str) -> None:
    """Else every refusal above could have another reason."""
    ops.reshape_and_cache(**store_arguments(), isa=isa)
    arguments = attention_arguments()
    ops.paged_attention(**arguments, isa=isa)
    assert not arguments["output"].any()


@pytest.mark.parametrize("isa", CPP_ISAS)
def test_unread_table_entries_may_be_anything(isa: str) -> None:
    """Beyond the sequence, of idle requests, and of tiles left by the window."""
    arguments = attention_arguments() | {
        "block_table": int32([0, 1, -5], [-7, 2, 9], [77, 77, 77]),
        "seq_lens": int32(40, 50, 90),
        "query_start_loc": int32(0, 2, 2, 2),
    }
    ops.paged_attention(**arguments, isa=isa)
    windowed = attention_arguments() | {
        "block_table": int32([-9, -9, -9, -9, 3]),
        "seq_lens": int32(150),
        "query_start_loc": int32(0, 1),
    }
    ops.paged_attention(**windowed, sliding_window=4, isa=isa)


@pytest.mark.parametrize("isa", CPP_ISAS)
def test_formats_without_a_kernel(isa: str) -> None:
    """A spec that nobody registered must not run as its nearest relative."""
    fmt = replace(FMT, name="polykv_k8v5", value_bits=5)
    cache = torch.zeros(4, 2, 32, fmt.slot_bytes(64), dtype=torch.uint8)
    changes = {"fmt": fmt, "kv_cache": cache}
    for op, arguments in (
        (ops.reshape_and_cache, store_arguments()),
        (ops.paged_attention, attention_arguments()),
    ):
        with pytest.raises(NotImplementedError) as error:
            op(**(arguments | changes), isa=isa)
        for word in ("polykv_k8v5", *FORMATS):
            assert word in str(error.value)
