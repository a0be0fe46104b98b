# SPDX-License-Identifier: Apache-2.0
"""How prefixes lie in each other: which blocks they begin with together."""

from collections.abc import Sequence
from dataclasses import dataclass

from polykv_vllm.pool.leader import num_shared


@dataclass
class Node:
    """A sequence of blocks: a prefix, or what several begin with.

    Attributes:
        num_blocks: From the first one on.
        parent: Index of the longest node that it continues; None: there is none.
        prefix: Index of the prefix that it is; None where several prefixes part.

    """

    num_blocks: int
    parent: int | None
    prefix: int | None


def nest(hashes: Sequence[Sequence[bytes]]) -> list[Node]:
    """Return the tree of some prefixes; each has one node.

    Flat, because a thousand prefixes may lie in each other.

    Args:
        hashes: For each prefix the hashes of its blocks; each covers all before it.

    """
    nodes: list[Node] = []
    path: list[int] = []  # from a root to the last node
    before: Sequence[bytes] = ()
    for prefix in sorted(range(len(hashes)), key=lambda i: tuple(hashes[i])):
        common = num_shared(before, hashes[prefix], len(before))
        last = None
        while path and nodes[path[-1]].num_blocks > common:
            last = path.pop()
        parent = path[-1] if path else None
        is_fork = parent is None or nodes[parent].num_blocks < common
        if last is not None and common > 0 and is_fork:
            nodes.append(Node(common, parent, None))
            parent = nodes[last].parent = len(nodes) - 1
            path.append(parent)
        nodes.append(Node(len(hashes[prefix]), parent, prefix))
        path.append(len(nodes) - 1)
        before = hashes[prefix]
    return nodes
