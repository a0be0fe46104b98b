# SPDX-License-Identifier: Apache-2.0
"""Digests of weight files, computed once for each file and remembered.

A file is known again by its size, its time of modification, and the bytes of its head
and tail; a change in the middle that keeps all three is not seen, so whoever edits
weights in place must not put the time back.
"""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

EXTENSIONS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Endings of the files that hold weights."""

_EDGE_BYTES = 64 << 10


class UnidentifiedError(Exception):
    """The weights cannot be told from others; the message says why."""


def weight_files(model: Path) -> list[Path]:
    """Return the files of a model's weights, in order of their names.

    Args:
        model: A directory, or one file.

    Raises:
        UnidentifiedError: There are none.

    """
    if model.is_file():
        return [model]
    found = sorted(p for p in model.glob("*") if p.suffix in EXTENSIONS and p.is_file())
    if not found:
        raise UnidentifiedError(
            f"{model} has no file that ends in {', '.join(EXTENSIONS)}"
        )
    return found


def files_digest(files: Iterable[Path], remembered: Path) -> str:
    """Return one digest for several files.

    Args:
        files: Read whole unless they are remembered.
        remembered: A JSON file for digests of files; made, with its directory.

    Raises:
        OSError: A file cannot be read. What cannot be remembered is no error.

    """
    whole = blake3()
    with _memory(remembered) as memory:
        for path in files:
            whole.update(f"{path.name}\0{_file_digest(path, memory)}\0".encode())
    return whole.hexdigest()


def _file_digest(path: Path, memory: dict[str, Any]) -> str:
    name, state = str(path.resolve()), path.stat()
    seen = {
        "size": state.st_size,
        "mtime_ns": state.st_mtime_ns,
        "edges": _edges_digest(path, state.st_size),
    }
    known = memory.get(name)
    if isinstance(known, dict) and seen.items() <= known.items():
        return str(known.get("digest"))
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    memory[name] = seen | {"digest": hasher.hexdigest()}
    return hasher.hexdigest()


def _edges_digest(path: Path, size: int) -> str:
    with path.open("rb") as file:
        edges = blake3(file.read(_EDGE_BYTES))
        file.seek(max(size - _EDGE_BYTES, 0))
        edges.update(file.read(_EDGE_BYTES))
    return edges.hexdigest()


@contextlib.contextmanager
def _memory(path: Path) -> Iterator[dict[str, Any]]:
    """Read the remembered digests, hold others off, and write what was added."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # every start will read the files again
        yield {}
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        memory = _load(path)
        before = dict(memory)
        yield memory
        if memory != before:
            with contextlib.suppress(OSError):
                _save(path, memory)
    finally:
        os.close(lock)


def _load(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _save(path: Path, memory: dict[str, Any]) -> None:
    descriptor, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        json.dump(memory, file, indent=1)
    os.replace(name, path)
