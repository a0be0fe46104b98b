# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_vllm.pool.disk.fields import digest, encode

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.just(1.5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=6,
)


def typed(value: Any) -> Any:
    """A form in which Python's == tells True from 1."""
    if isinstance(value, dict):
        return {k: typed(v) for k, v in value.items()}
    if isinstance(value, list):
        return [typed(v) for v in value]
    return (type(value), value)


@given(VALUES, VALUES)
def test_equal_bytes_mean_equal_values(a: Any, b: Any) -> None:
    assert (encode(a) == encode(b)) == (typed(a) == typed(b))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"lora": "x", "salt": None}, {"lora": None, "salt": "x"}),
        ({"a": ["xy", "z"]}, {"a": ["x", "yz"]}),
        ({"a": 1}, {"a": True}),
        ({"a": "1"}, {"a": 1}),
        ({"a": b"x"}, {"a": "x"}),
        ({"a": []}, {"a": None}),
    ],
)
def test_values_that_look_alike_differ(a: Any, b: Any) -> None:
    assert digest("kind", a) != digest("kind", b)


def test_kinds_differ_and_the_order_of_fields_does_not_matter() -> None:
    assert digest("x", {"a": 1, "b": 2}) == digest("x", {"b": 2, "a": 1})
    assert digest("x", {"a": 1}) != digest("y", {"a": 1})


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="set"):
        encode({1})  # type: ignore[arg-type]
