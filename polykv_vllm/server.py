# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` child process that never outlives its owner.

The API server, the engine core and its workers are all in its process group.
"""

import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from polykv_vllm.process import ProcessGroup

HOST = "127.0.0.1"
STARTUP_TIMEOUT_S = 300.0
_DEATH_S = 5.0
_POLL_S = 0.25

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


class VllmServer(ProcessGroup):
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
        super().__init__(log_path, environment, cpus)
        self.port = _free_port() if port is None else port
        self.base_url = f"http://{HOST}:{self.port}"
        self._port_was_asked_for = port is not None
        self._arguments = list(arguments)

    @property
    def command(self) -> list[str]:
        """The command line: the `vllm` of this very environment."""
        vllm = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
        address = ["--host", HOST, "--port", str(self.port)]
        return [*vllm, *self._arguments, *address]

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
        self.start(self.command)
        return self

    def wait_until_healthy(
        self,
        on_stage: Callable[[str], None] = lambda stage: None,
        timeout_s: float | None = None,
    ) -> None:
        """Return when the server answers.

        Args:
            on_stage: Called with a few words whenever start-up reaches a new stage.
            timeout_s: How long that may take; None for `STARTUP_TIMEOUT_S`.

        Raises:
            ServerError: It ended, or was not ready in time.

        """
        timeout_s = STARTUP_TIMEOUT_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        stage = ""
        while not _answers(f"{self.base_url}/health"):
            if (code := self.exit_code()) is not None:
                raise ServerError(
                    f"vllm serve ended with exit {code}:\n{self.explanation()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(
                    f"vllm serve was not ready within {timeout_s:.0f} s:\n"
                    f"{self.log_tail()}"
                )
            if (latest := self._stage()) != stage:
                stage = latest
                on_stage(stage)
            time.sleep(_POLL_S)

    def check_alive(self, patience_s: float = 0.0) -> None:
        """Raise `ServerError` with the reason from its log if the server has ended.

        Args:
            patience_s: How long a server may take to end that is about to: when its
                engine dies, requests fail some time before the whole has ended.

        """
        if (code := self.exit_code(patience_s)) is not None:
            raise ServerError(f"vllm serve died, exit {code}:\n{self.explanation()}")

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
            raise ServerError(f"{url}: {error}:\n{self.explanation()}") from error

    def _stage(self) -> str:
        log = self.log_path.read_text(errors="replace")
        reached = [words for mark, words in _STAGES if mark in log]
        return reached[-1] if reached else "importing vLLM"


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
