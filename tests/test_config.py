# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from polykv_vllm.config import PolyKVConfig, key_treatments, parse_options
from polykv_vllm.errors import OptionError
from polykv_vllm.windows.sizes import WindowSizes


@pytest.mark.parametrize("given", [None, {}, {"other": 1}, {"polykv": {}}, "hashable"])
def test_defaults(given: Any) -> None:
    assert parse_options(given) == PolyKVConfig(isa="auto")


def test_a_given_option() -> None:
    assert parse_options({"polykv": {"isa": "scalar"}}).isa == "scalar"


def test_key_treatments_are_those_of_the_keys_and_auto() -> None:
    from polykv_vllm.keys import TREATMENTS

    assert key_treatments() == ("auto", *TREATMENTS)
    assert PolyKVConfig().key_treatment == "auto"


def test_windows_are_off_and_have_the_recommended_sizes() -> None:
    assert PolyKVConfig().windows is None
    windows = parse_options({"polykv": {"windows": {}}}).windows
    assert windows is not None and windows.is_used
    assert windows.sizes(2) == WindowSizes(64, 256, 2)
    off = parse_options({"polykv": {"windows": {"sink_tokens": 0, "recent_tokens": 0}}})
    assert off.windows is not None and not off.windows.is_used


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"isaa": "scalar"}, ["isaa", "'scalar'", "no such option", "isa (one of"]),
        ({"isa": "sse2"}, ["isa", "'sse2'", "'avx512'", "'reference'"]),
        ({"key_treatment": "none "}, ["key_treatment", "'none '", "'channel_scale'"]),
        ({"isa": True}, ["isa", "True", "'auto'"]),
        ({"isa": "sse2", "x": 1}, ["'sse2'", "['x'] = 1"]),
        (3, ["mapping", "3", "isa"]),
        (
            {"windows": {"sink_tokens": -1}},
            [
                "windows.sink_tokens",
                "-1",
                "greater than or equal to 0",
                "recent_tokens",
            ],
        ),
        ({"windows": {"last": 9}}, ["windows.last", "9", "max_sequences"]),
        ({"windows": 64}, ["windows", "64", "docs/windows.md"]),
        ({"windows": {"max_sequences": 0}}, ["windows.max_sequences", "0"]),
    ],
)
def test_errors_name_key_value_and_what_is_allowed(
    given: Any, parts: list[str]
) -> None:
    with pytest.raises(OptionError) as error:
        parse_options({"polykv": given})
    for part in parts:
        assert part in str(error.value)
