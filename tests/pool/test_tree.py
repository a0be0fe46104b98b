# SPDX-License-Identifier: Apache-2.0
"""The tree of prefixes beside one found by trying all pairs."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_vllm.pool.tree import nest


def chain(tokens: str) -> list[bytes]:
    """Return hashes as vLLM makes them: each covers all that is before it."""
    return [
        hashlib.sha256(tokens[: i + 1].encode()).digest() for i in range(len(tokens))
    ]


def described(prefixes: list[str]) -> dict[str, str | None]:
    """Return for each named prefix the text of the node above it."""
    nodes = nest([chain(text) for text in prefixes])
    texts = []
    for index, node in enumerate(nodes):
        below = index
        while (prefix := nodes[below].prefix) is None:
            below = [n.parent for n in nodes].index(below)
        texts.append(prefixes[prefix][: node.num_blocks])
    return {
        prefixes[node.prefix]: None if node.parent is None else texts[node.parent]
        for node in nodes
        if node.prefix is not None
    }


def test_nothing_is_no_tree() -> None:
    assert nest([]) == []


@pytest.mark.parametrize(
    ("prefixes", "parents"),
    [
        (["ab"], {"ab": None}),
        (["abc", "ab", "abd"], {"ab": None, "abc": "ab", "abd": "ab"}),
        (["abc", "abd"], {"abc": "ab", "abd": "ab"}),
        (["abce", "abcf", "abd"], {"abce": "abc", "abcf": "abc", "abd": "ab"}),
        (["a", "b"], {"a": None, "b": None}),
        (
            ["abcd", "abce", "xy", "x"],
            {"abcd": "abc", "abce": "abc", "x": None, "xy": "x"},
        ),
    ],
)
def test_shared_blocks_are_a_node(
    prefixes: list[str], parents: dict[str, str | None]
) -> None:
    assert described(prefixes) == parents


def test_two_names_of_the_same_blocks_are_two_nodes() -> None:
    nodes = nest([chain("ab"), chain("ab")])
    assert [node.num_blocks for node in nodes] == [2, 2]
    assert [node.parent for node in nodes] == [None, 0]


def test_many_prefixes_in_each_other() -> None:
    """Deeper than Python's stack."""
    hashes = chain("x" * 1200)
    nodes = nest([hashes[:n] for n in range(1200, 0, -1)])
    assert [node.num_blocks for node in nodes] == list(range(1, 1201))


@given(st.lists(st.text("ab", min_size=1, max_size=6), unique=True, max_size=12))
def test_the_node_above_is_the_longest_beginning(prefixes: list[str]) -> None:
    def longest(text: str) -> str | None:
        others = [other for other in prefixes if other != text]
        starts = [o for o in others if text.startswith(o)]
        for one in others:
            count = 0
            while count < min(len(one), len(text)) and one[count] == text[count]:
                count += 1
            if 0 < count < len(text):
                starts.append(text[:count])
        return max(starts, key=len, default=None)

    assert described(prefixes) == {text: longest(text) for text in prefixes}
