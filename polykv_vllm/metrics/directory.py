# SPDX-License-Identifier: Apache-2.0
"""A directory per server, in memory where the system has such a place.

The front end makes it and holds a lock in it; the kernel drops the lock however that
process ends, so a directory whose lock can be had belongs to a dead server, and the
next start removes it. A pid would not do: servers in different containers may share
the place and do not see each other's processes.
"""

import atexit
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MEMORY = Path("/dev/shm")
_LOCK = "lock"


class ServerDirectory:
    """A new directory; it goes with `remove`, or with this process.

    Args:
        base: Where the user's servers have theirs; made if missing.

    Raises:
        OSError: It cannot be made, or `base` belongs to another user.

    """

    def __init__(self, base: Path | None = None) -> None:
        base = base or default_base()
        _make_private(base)
        # Held while a directory is new and not yet locked: nobody takes it for dead.
        with _locked(base / _LOCK):
            _remove_dead(base)
            self.path = Path(tempfile.mkdtemp(prefix="server-", dir=base))
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._owner = os.getpid()
        atexit.register(self.remove)

    def remove(self) -> None:
        """Delete it; files that a worker still writes live on, unseen, with it.

        In a forked child, which inherits the exit handler, nothing happens.
        """
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.remove)
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # closed before
            os.close(self._lock)
        self._owner = -1


def default_base() -> Path:
    """Return where this user's servers have their directories."""
    in_memory = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
    parent = _MEMORY if in_memory else Path(tempfile.gettempdir())
    return parent / f"polykv-metrics-{os.getuid()}"


def _make_private(base: Path) -> None:
    """Make a directory that only this user can use, in a place that all can write."""
    base.mkdir(mode=0o700, exist_ok=True)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{base} is not a directory of user {os.getuid()}")


def _remove_dead(base: Path) -> None:
    for directory in base.glob("server-*"):
        try:
            with _locked(directory / _LOCK, fcntl.LOCK_NB):
                shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:  # its server lives
            continue
        except FileNotFoundError:  # its server has just removed it
            continue


@contextlib.contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[None]:
    """Hold an exclusive lock on a file, made if missing.

    Raises:
        BlockingIOError: Another process holds it and `flags` has LOCK_NB.

    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(descriptor)
