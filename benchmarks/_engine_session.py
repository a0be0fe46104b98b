# SPDX-License-Identifier: Apache-2.0
"""Runs the arms of the engine benchmark, each an engine in processes of its own.

An idle vLLM worker polls for work. So that it takes nothing from the arm that is
measured, all processes of an arm stand still (SIGSTOP) except while it answers.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_LOG_TAIL_LINES = 100  # vLLM's root cause stands far above its last line
_SHUTDOWN_S = 30.0

Worker = "benchmarks._worker.BenchmarkWorker"
WorkerWithoutAmx = "benchmarks._worker_avx512.Avx512Worker"


class EngineError(RuntimeError):
    """An engine did not start, or died; the message has the end of its log."""


class EngineSession:
    """One arm: starts at construction, answers orders, ends with `close`."""

    def __init__(
        self, name: str, options: dict[str, Any], threads: int, log: Path
    ) -> None:
        """Start the engine and wait until it is ready.

        Args:
            name: For messages.
            options: Keyword arguments of `vllm.LLM`.
            threads: Compute threads; bound to the last CPUs of this process.
            log: File for the engine's output.

        Raises:
            EngineError: It did not start.

        """
        self.name, self._log = name, log
        cpus = sorted(os.sched_getaffinity(0))[-threads:]
        environment = {
            **os.environ,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
            "PYTHONPATH": os.pathsep.join(
                [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        read_end, write_end = os.pipe()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks._engine_process", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[write_end],
                env=environment,
                text=True,
                start_new_session=True,
            )
        os.close(write_end)
        self._answers = os.fdopen(read_end)
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self.facts: dict[str, Any] = self._exchange(options)
            on_failure.pop_all()
        self._pause()

    def ask(self, order: str, **arguments: Any) -> Any:
        """Have the arm carry out an order (see `EngineArm`); return its answer.

        Raises:
            EngineError: The engine died.

        """
        self._signal(signal.SIGCONT)
        answer = self._exchange({"order": order, **arguments})
        self._pause()
        return answer

    def rpc(self, method: str) -> Any:
        """Call a method of _worker.py in the arm's worker."""
        return self.ask("rpc", method=method)

    def close(self) -> None:
        """End the engine and every process it started."""
        self._signal(signal.SIGCONT)
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_SHUTDOWN_S)
        finally:
            self._signal(signal.SIGKILL)  # whatever is left of the group
            self._process.wait()
            self._answers.close()

    def _exchange(self, message: dict[str, Any]) -> Any:
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # it died; the empty answer says so
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
        line = self._answers.readline()
        if not line:
            raise EngineError(f"engine {self.name!r} ended:\n{self._log_tail()}")
        return json.loads(line)

    def _pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, number)

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])


@contextmanager
def engine_session(
    name: str, options: dict[str, Any], threads: int
) -> Iterator[EngineSession]:
    """Yield a running `EngineSession`; close it in any case."""
    with tempfile.TemporaryDirectory(prefix="polykv-bench-") as directory:
        session = EngineSession(name, options, threads, Path(directory, "engine.log"))
        try:
            yield session
        finally:
            session.close()
