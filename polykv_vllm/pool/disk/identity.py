# SPDX-License-Identifier: Apache-2.0
"""What the bytes of one rank's blocks mean, and how that differs from another's.

Two ranks may exchange blocks only if every field is equal. The fields are kept beside
the blocks, so that a start can say why it will not read what is there.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from polykv_vllm.pool.disk.fields import Value, digest

STORE_VERSION = 1
"""Raised when names or files of the store change their meaning."""

FILE_NAME = "identity.json"
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class RankIdentity:
    """The meaning of one rank's blocks.

    Attributes:
        fields: By name: the layers' formats, the weights, the shares of the rank, and
            whatever else must agree. Values that JSON can hold.

    """

    fields: Mapping[str, Value]

    @cached_property
    def digest(self) -> bytes:
        """The sha256 of all fields and the version of the store."""
        return digest("rank", {"store": STORE_VERSION, "fields": self.fields})

    @property
    def directory(self) -> str:
        """The name of the rank's directory."""
        return self.digest.hex()

    def differences(self, other: "RankIdentity") -> list[str]:
        """Say field by field what this one has and the other has not."""
        names = sorted({*self.fields, *other.fields})
        return [
            f"{name}: here {_short(self.fields.get(name))}, "
            f"there {_short(other.fields.get(name))}"
            for name in names
            if self.fields.get(name) != other.fields.get(name)
        ]

    def save(self, directory: Path) -> None:
        """Write the fields into a directory, whole or not at all."""
        unfinished = directory / f".{FILE_NAME}"
        unfinished.write_text(json.dumps(self.fields, indent=1, sort_keys=True))
        unfinished.chmod(0o600)
        unfinished.rename(directory / FILE_NAME)


def load_identity(directory: Path) -> RankIdentity | None:
    """Read the fields of a directory; None unless they are those of its name."""
    try:
        fields = json.loads((directory / FILE_NAME).read_text())
        identity = RankIdentity(fields)
        return identity if identity.directory == directory.name else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _short(value: Value) -> str:
    text = json.dumps(value, sort_keys=True)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}..."
