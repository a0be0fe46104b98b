# SPDX-License-Identifier: Apache-2.0
"""A child process that never outlives its owner, and what its log says.

It leads a process group of its own, which is what is stopped in the end: all that it
starts is in it. It stays in its owner's session: only there does the kernel wake a
paused group whose owner was killed (SIGHUP, then SIGCONT), so that not even a paused
process is left behind.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

_TERMINATE_TIMEOUT_S = 15.0
_KILL_TIMEOUT_S = 10.0
_POLL_S = 0.05
_LOG_TAIL_LINES = 25
# At the start of a line, or behind the logger's "ERROR ... [core.py:1510] ".
_ERROR = re.compile(
    r"(?:^|\] )((?:\w+\.)*[A-Z]\w*(?:Error|Exception): .+)", re.MULTILINE
)
# What Python's libraries print when the process ends.
_NOISE = re.compile(r"nanobind: | - (leaked|\.\.\. skipped) |See https://nanobind")
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


class ProcessGroup:
    """Context manager: stopped with all that it started when it is left.

    Args:
        log_path: Receives everything that its processes print.
        environment: Variables on top of this process's own.
        cpus: Where its processes may run; None leaves this process's own.

    """

    def __init__(
        self,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        cpus: Iterable[int] | None = None,
    ) -> None:
        self.log_path = log_path
        self._environment = dict(environment or {})
        self._cpus = None if cpus is None else tuple(cpus)
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        command: Sequence[str],
        stdin: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Run `command` as the group's leader."""
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=_environment() | self._environment,
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                process_group=0,
                preexec_fn=self._prepare_child,
            )
        return self._process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def process_group(self) -> int:
        """Id of the process group, which is the pid of its leader."""
        assert self._process is not None, "it was not started"
        return self._process.pid

    def exit_code(self, patience_s: float = 0.0) -> int | None:
        """Return the leader's exit code, None while it lives.

        Args:
            patience_s: How long to wait for it to end.

        """
        assert self._process is not None, "it was not started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience_s)
        return None

    def pause(self) -> None:
        """Let every process stand still: an idle worker polls."""
        _signal_group(self.process_group, signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`; harmless otherwise."""
        _signal_group(self.process_group, signal.SIGCONT)

    def stop(self) -> None:
        """End every process of the group; return when none is left.

        A second Ctrl-C does not interrupt this: it would leave the engine behind.
        """
        if self._process is None:
            return
        with _uninterrupted():
            _signal_group(self._process.pid, signal.SIGTERM)
            _signal_group(self._process.pid, signal.SIGCONT)  # if it was paused
            if not self._group_ends_within(_TERMINATE_TIMEOUT_S):
                _signal_group(self._process.pid, signal.SIGKILL)
                self._group_ends_within(_KILL_TIMEOUT_S)

    def log_tail(self) -> str:
        """Return the last lines of the log that say something."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        telling = [line for line in lines if not _NOISE.match(line)]
        return "\n".join(telling[-_LOG_TAIL_LINES:])

    def explanation(self) -> str:
        """Return the first error in the log, then its end: vLLM's last is never why."""
        tail = self.log_tail()
        found = _ERROR.search(self.log_path.read_text(errors="replace"))
        return f"{found[1]}\n...\n{tail}" if found and found[1] not in tail else tail

    def _prepare_child(self) -> None:
        _die_with_parent()
        if self._cpus is not None:
            os.sched_setaffinity(0, self._cpus)

    def _group_ends_within(self, seconds: float) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._process.poll()  # reaps the leader, which would stay a zombie
            if not group_members(self._process.pid):
                return True
            time.sleep(_POLL_S)
        return False


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore what would end this process. Signals can be set in the main thread only.

    Elsewhere no handler runs anyway: Python calls them in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """Have SIGTERM and SIGHUP unwind the stack, which stops the groups.

    Their default is to end this process at once. Only for the main thread.
    """

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handling(unwind, signal.SIGTERM, signal.SIGHUP):
        yield


@contextlib.contextmanager
def _handling(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals with `handler` until this is left."""
    kept = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in kept.items():
            signal.signal(number, before)


def group_members(process_group: int) -> list[int]:
    """Return the pids of the living processes of `process_group`.

    A zombie has ended: in a container nobody may ever reap it, so it is not counted.
    """
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:  # ended since the directory was listed
            continue
        # "pid (name) state ppid pgrp ...": the name may hold blanks and brackets.
        state, _, group = stat.rpartition(")")[2].split()[:3]
        if int(group) == process_group and state != "Z":
            members.append(int(entry.name))
    return members


def _signal_group(process_group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it may have ended
        os.killpg(process_group, number)


def _die_with_parent() -> None:
    """Have the kernel end the child if this process is killed outright (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _environment() -> dict[str, str]:
    """Return the child's environment: offline, nothing reported to anyone."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "NO_COLOR": "1"}
    return {**os.environ, **quiet}
