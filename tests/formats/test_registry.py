# SPDX-License-Identifier: Apache-2.0
"""Names, bytes and ratios that the README and the engine rely on."""

import pytest

from polykv_vllm.formats import (
    ALIASES,
    CACHE_DTYPES,
    FORMATS,
    get_format,
    is_polykv_dtype,
)


@pytest.mark.parametrize(
    ("name", "head_dim", "slot_bytes"),
    [
        ("polykv_k8v3", 64, 92),
        ("polykv_k8v3", 128, 180),
        ("polykv_k8v3", 256, 356),
        ("polykv_k7v4", 64, 92),
        ("polykv_k7v4", 128, 180),
        ("polykv_k7v4", 256, 356),
        ("polykv_k8v4", 64, 100),
        ("polykv_k8v4", 128, 196),
        ("polykv_k8v8", 64, 132),
        ("polykv_k8v8", 128, 260),
    ],
)
def test_slot_bytes_are_exact(name: str, head_dim: int, slot_bytes: int) -> None:
    assert get_format(name).slot_bytes(head_dim) == slot_bytes


def test_compression_ratio() -> None:
    fmt = get_format("polykv")
    assert fmt.compression_ratio(64) == 256 / 92
    assert fmt.compression_ratio(128) == 512 / 180
    assert fmt.compression_ratio(64, itemsize=4) == 512 / 92


@pytest.mark.parametrize("name", FORMATS)
def test_names_say_what_the_format_is(name: str) -> None:
    fmt = FORMATS[name]
    assert name == fmt.name == f"polykv_k{fmt.key_bits}v{fmt.value_bits}"
    assert get_format(name) is fmt


def test_polykv_is_the_published_format() -> None:
    assert get_format("polykv") is FORMATS["polykv_k8v3"]
    assert set(CACHE_DTYPES) == set(ALIASES) | set(FORMATS)


@pytest.mark.parametrize("name", ["polykv_k1v1", "", "auto", "POLYKV", "fp8"])
def test_unknown_name_lists_what_exists(name: str) -> None:
    assert not is_polykv_dtype(name)
    with pytest.raises(ValueError) as error:
        get_format(name)
    assert repr(name) in str(error.value)
    for known in CACHE_DTYPES:
        assert known in str(error.value)


def test_no_dtype_is_no_polykv_dtype() -> None:
    assert not is_polykv_dtype(None)


@pytest.mark.parametrize("head_dim", [0, 16, 48, 72, 100, 288, 576])
@pytest.mark.parametrize("name", FORMATS)
def test_unsupported_head_dim_lists_what_exists(name: str, head_dim: int) -> None:
    with pytest.raises(ValueError) as error:
        FORMATS[name].slot_bytes(head_dim)
    for word in (name, str(head_dim), *map(str, FORMATS[name].head_dims)):
        assert word in str(error.value)
