# SPDX-License-Identifier: Apache-2.0
"""What the two halves of the connector tell each other; pickled between processes."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)


@dataclass(frozen=True)
class BlockAt:
    """A block of the cache and the name of what it holds, or is to hold."""

    name: bytes
    block_id: int


@dataclass
class Orders(KVConnectorMetadata):
    """What the workers do in one step.

    Attributes:
        load: Blocks to fill before the forward.
        save: Blocks that are whole after it, and not known to be on disk.
        clear: Whether to remove everything first.
        pinned: The blocks that must stay on disk; None: those as before.

    """

    load: list[BlockAt] = field(default_factory=list)
    save: list[BlockAt] = field(default_factory=list)
    clear: bool = False
    pinned: list[bytes] | None = None


@dataclass
class RankAnswer(KVConnectorHandshakeMetadata):
    """What a worker says of itself when the engine starts.

    Attributes:
        directory: Where its blocks lie; None when it has no store.

    """

    directory: str | None
