# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` child process that never outlives its owner.

The server leads a process group of its own, which is what is stopped in the end: the
API server, the engine core and its workers are all in it. It stays in its owner's
session: only there does the kernel wake a paused group whose owner was killed (SIGHUP,
then SIGCONT), so that not even a paused server is left behind.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

HOST = "127.0.0.1"
STARTUP_TIMEOUT_S = 300.0
_TERMINATE_TIMEOUT_S = 15.0
_KILL_TIMEOUT_S = 10.0
_DEATH_S = 5.0
_POLL_S = 0.25
_LOG_TAIL_LINES = 25
# At the start of a line, or behind the logger's "ERROR ... [core.py:1510] ".
_ERROR = re.compile(
    r"(?:^|\] )((?:\w+\.)*[A-Z]\w*(?:Error|Exception): .+)", re.MULTILINE
)
# What Python's libraries print when the process ends.
_NOISE = re.compile(r"nanobind: | - (leaked|\.\.\. skipped) |See https://nanobind")
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>

# What vLLM's log says, and what a person is told while it is the latest of these.
_STAGES = (
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("Starting to load model", "loading the weights"),
    ("Loading weights took", "sizing the cache"),
    ("KV cache size", "warming up"),
    ("Starting vLLM server", "opening the API"),
)


class ServerError(RuntimeError):
    """The server failed; the message ends with the last lines of its log."""


class VllmServer:
    """Context manager: a started server inside, no process of it left outside.

    Args:
        arguments: What follows `vllm serve` on the command line, without host and
            port.
        log_path: Receives everything that the server prints.
        environment: Variables for the server on top of this process's own.
        port: Where it listens; None takes a free one.
        cpus: Where its processes may run; None leaves this process's own.

    """

    def __init__(
        self,
        arguments: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
        cpus: Iterable[int] | None = None,
    ) -> None:
        self.log_path = log_path
        self.port = _free_port() if port is None else port
        self.base_url = f"http://{HOST}:{self.port}"
        self._port_was_asked_for = port is not None
        self._arguments = list(arguments)
        self._environment = dict(environment or {})
        self._cpus = None if cpus is None else tuple(cpus)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def command(self) -> list[str]:
        """The command line: the `vllm` of this very environment."""
        vllm = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
        address = ["--host", HOST, "--port", str(self.port)]
        return [*vllm, *self._arguments, *address]

    @property
    def process_group(self) -> int:
        """Id of the server's process group, which is the pid of its leader."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def __enter__(self) -> Self:
        """Start the server; it is not ready yet.

        Raises:
            ServerError: The port that was asked for is in use.

        """
        if self._port_was_asked_for and not _can_bind(self.port):
            raise ServerError(
                f"port {self.port} of {HOST} is in use: choose another, or none for a "
                "free one"
            )
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=_environment() | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=self._prepare_child,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_until_healthy(
        self, on_stage: Callable[[str], None] = lambda stage: None
    ) -> None:
        """Return when the server answers.

        Args:
            on_stage: Called with a few words whenever start-up reaches a new stage.

        Raises:
            ServerError: It ended, or was not ready within `STARTUP_TIMEOUT_S`.

        """
        assert self._process is not None, "the server was not started"
        deadline = time.monotonic() + STARTUP_TIMEOUT_S
        stage = ""
        while not _answers(f"{self.base_url}/health"):
            if (code := self._process.poll()) is not None:
                raise ServerError(
                    f"vllm serve ended with exit {code}:\n{self._explanation()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(
                    f"vllm serve was not ready within {STARTUP_TIMEOUT_S:.0f} s:\n"
                    f"{self.log_tail()}"
                )
            if (latest := self._stage()) != stage:
                stage = latest
                on_stage(stage)
            time.sleep(_POLL_S)

    def pause(self) -> None:
        """Let every process of the server stand still: an idle worker polls."""
        _signal_group(self.process_group, signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`; harmless otherwise."""
        _signal_group(self.process_group, signal.SIGCONT)

    def check_alive(self, patience_s: float = 0.0) -> None:
        """Raise `ServerError` with the reason from its log if the server has ended.

        Args:
            patience_s: How long a server may take to end that is about to: when its
                engine dies, requests fail some time before the whole has ended.

        """
        assert self._process is not None, "the server was not started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(patience_s)
            raise ServerError(f"vllm serve died, exit {code}:\n{self._explanation()}")

    def stop(self) -> None:
        """End every process of the server's group; return when none is left.

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

    def metrics(self) -> str:
        """Return the text of the server's `/metrics`.

        Raises:
            ServerError: It does not answer.

        """
        url = f"{self.base_url}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                return str(reply.read(), "utf-8")
        except OSError as error:
            self.check_alive(_DEATH_S)
            raise ServerError(f"{url}: {error}:\n{self._explanation()}") from error

    def log_tail(self) -> str:
        """Return the last lines of the log that say something."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        telling = [line for line in lines if not _NOISE.match(line)]
        return "\n".join(telling[-_LOG_TAIL_LINES:])

    def _prepare_child(self) -> None:
        _die_with_parent()
        if self._cpus is not None:
            os.sched_setaffinity(0, self._cpus)

    def _explanation(self) -> str:
        """Return the first error in the log, then its end: vLLM's last is never why."""
        tail = self.log_tail()
        found = _ERROR.search(self.log_path.read_text(errors="replace"))
        return f"{found[1]}\n...\n{tail}" if found and found[1] not in tail else tail

    def _stage(self) -> str:
        log = self.log_path.read_text(errors="replace")
        reached = [words for mark, words in _STAGES if mark in log]
        return reached[-1] if reached else "importing vLLM"

    def _group_ends_within(self, seconds: float) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._process.poll()  # reaps the leader, which would stay a zombie
            if not group_members(self._process.pid):
                return True
            time.sleep(_POLL_S / 5)
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
    """Have SIGTERM and SIGHUP unwind the stack, which stops the servers.

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
    """Have the kernel end the server if this process is killed outright (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _environment() -> dict[str, str]:
    """Return the child's environment: offline, nothing reported to anyone."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "NO_COLOR": "1"}
    return {**os.environ, **quiet}
