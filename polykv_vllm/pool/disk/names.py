# SPDX-License-Identifier: Apache-2.0
"""Named prefixes on disk, so that a restart knows them again.

One file for each, called by the digest of salt and name: written whole or not at all,
so there is nothing to repair, and several servers over one directory disturb each other
only where they use the same name. A file has the prompt's tokens and the salt, and is
readable by its owner alone. What is not exactly such a file is left where it is, named
in the log, and not believed.
"""

import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polykv_vllm.pool.disk.fields import digest
from polykv_vllm.pool.pins import MAX_TTL_S, NAME

logger = logging.getLogger("vllm.polykv")

VERSION = 1
MAX_FILE_BYTES = 64 << 20
MAX_FILES = 10_000

_FILE = re.compile(r"[0-9a-f]{64}\.json")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.\d+")
_ABANDONED_S = 3600.0
_Token = Annotated[int, Field(ge=0, lt=1 << 32)]


class HostileFileError(Exception):
    """A file is not one that this package has written; the message says why."""


class _Stored(BaseModel):
    """The content of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: int
    name: str = Field(pattern=NAME)
    salt: str | None = Field(min_length=1)
    token_ids: list[_Token] = Field(min_length=1)
    ttl_s: float | None = Field(gt=0, le=MAX_TTL_S)
    created_s: float = Field(allow_inf_nan=False)
    is_pinned: bool
    checksum: str


@dataclass(frozen=True)
class StoredPrefix:
    """A named prefix as it is kept.

    Attributes:
        name: Unique for its salt.
        salt: The `cache_salt` of whoever may use it.
        token_ids: All of them.
        ttl_s: Seconds that a pin lasts after it was made or last hit.
        created_s: When it was named, seconds since 1970.
        is_pinned: Whether it was to be pinned.
        used_s: When it was pinned or hit last, about; that is the file's time.

    """

    name: str
    salt: str | None
    token_ids: tuple[int, ...]
    ttl_s: float | None
    created_s: float
    is_pinned: bool
    used_s: float = 0.0


class NamesDirectory:
    """The files of a directory; made when the first one is written.

    Args:
        path: Below the pool's directory, which nobody else can write to.

    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, prefix: StoredPrefix) -> None:
        """Write a prefix; what was there under its name is replaced.

        Raises:
            OSError: The disk is full, or the directory has gone.

        """
        self._path.mkdir(mode=0o700, exist_ok=True)
        path = self._file(prefix.salt, prefix.name)
        unfinished = self._path / f".{path.stem}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(unfinished, flags, 0o600), "w") as file:
                json.dump(_content(prefix), file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(unfinished, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise

    def touch(self, salt: str | None, name: str) -> None:
        """Note that a prefix was hit now."""
        with suppress(OSError):
            os.utime(self._file(salt, name), follow_symlinks=False)

    def remove(self, salt: str | None, name: str) -> None:
        """Forget a prefix.

        Raises:
            OSError: It cannot be removed.

        """
        self._file(salt, name).unlink(missing_ok=True)

    def load(self) -> list[StoredPrefix]:
        """Return what is there, the oldest first; what cannot be believed is logged."""
        found = []
        for path in self._files():
            try:
                found.append(_read(path))
            except (HostileFileError, OSError) as error:
                logger.warning("Pool: %s names no prefix: %s", path, error)
        return sorted(found, key=lambda prefix: prefix.created_s)

    def _files(self) -> Iterator[Path]:
        try:
            names = sorted(os.listdir(self._path))
        except FileNotFoundError:
            return
        except OSError as error:
            logger.error("Pool: no names of prefixes are known: %s", error)
            return
        for name in filter(_UNFINISHED.fullmatch, names):
            path = self._path / name
            with suppress(OSError):  # of a server that was killed
                if time.time() - path.lstat().st_mtime > _ABANDONED_S:
                    path.unlink()
        files = [name for name in names if _FILE.fullmatch(name)]
        if len(files) > MAX_FILES:
            logger.warning(
                "Pool: %s has %d files; only %d are read",
                self._path,
                len(files),
                MAX_FILES,
            )
        yield from (self._path / name for name in files[:MAX_FILES])

    def _file(self, salt: str | None, name: str) -> Path:
        return self._path / f"{_key(salt, name)}.json"


def _read(path: Path) -> StoredPrefix:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise HostileFileError("it is not a regular file")
        if state.st_uid != os.getuid() or state.st_mode & 0o077:
            raise HostileFileError("others than this user may read or write it")
        if state.st_size > MAX_FILE_BYTES:
            raise HostileFileError(f"{state.st_size} bytes are too many")
        text = file.read(MAX_FILE_BYTES)
    try:
        found = _Stored.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise HostileFileError(f"{place}: {first['msg']}") from None
    if found.version != VERSION:
        raise HostileFileError(f"version {found.version}; this one reads {VERSION}")
    fields = found.model_dump(exclude={"version", "checksum"})
    fields["token_ids"] = tuple(found.token_ids)
    prefix = StoredPrefix(**fields)
    if found.checksum != _checksum(prefix):
        raise HostileFileError("its checksum does not match")
    if path.stem != _key(prefix.salt, prefix.name):
        raise HostileFileError("it has the name of another prefix")
    return replace(prefix, used_s=state.st_mtime)


def _content(prefix: StoredPrefix) -> dict[str, object]:
    return {
        "version": VERSION,
        **_fields(prefix),
        "checksum": _checksum(prefix),
    }


def _fields(prefix: StoredPrefix) -> dict[str, object]:
    return {
        "name": prefix.name,
        "salt": prefix.salt,
        "token_ids": list(prefix.token_ids),
        "ttl_s": prefix.ttl_s,
        "created_s": prefix.created_s,
        "is_pinned": prefix.is_pinned,
    }


def _checksum(prefix: StoredPrefix) -> str:
    return digest("stored prefix", {"fields": json.dumps(_fields(prefix))}).hex()


def _key(salt: str | None, name: str) -> str:
    return digest("prefix name", {"salt": salt, "name": name}).hex()
