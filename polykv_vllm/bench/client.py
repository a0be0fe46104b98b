# SPDX-License-Identifier: Apache-2.0
"""Drives `vllm bench serve`, in a process on the service CPUs."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from polykv_vllm.bench.errors import RunError
from polykv_vllm.bench.workload import Prompt, write_dataset

MODEL_NAME = "bench"
RUN_TIMEOUT_S = 3600.0
_START_TIMEOUT_S = 300.0
_TICK_S = 1.0
_END_TIMEOUT_S = 5.0
_LOG_TAIL_LINES = 15


class BenchClient:
    """Context manager: vLLM's benchmark client, ready for one run after the other.

    It starts at once and is waited for at the first run.

    Args:
        folder: For its log, the prompts and its results.
        cpus: Where it may run.

    """

    def __init__(self, folder: Path, cpus: tuple[int, ...]) -> None:
        self._folder = folder
        self._cpus = cpus

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(_END_TIMEOUT_S if error is None else 0.1)

    def _start(self) -> None:
        self._is_ready = False
        read_end, write_end = os.pipe()
        module = "polykv_vllm.bench.client_process"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(write_end)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[write_end],
                preexec_fn=lambda: os.sched_setaffinity(0, self._cpus),
                process_group=0,  # Ctrl-C is for this process, which ends the client
                env={**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
            )
        os.close(write_end)
        self._answers = os.fdopen(read_end, "rb", buffering=0)

    def _end(self, patience_s: float) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._answers.close()

    def run(
        self,
        base_url: str,
        prompts: list[Prompt],
        output_tokens: int,
        request_rate: float = float("inf"),
        while_waiting: Callable[[], None] = lambda: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Send all prompts and return what the client measured.

        Args:
            base_url: The server.
            prompts: Token ids, in this order.
            output_tokens: To be generated for each, whatever the model says; 2 or more.
            request_rate: Requests per second, evenly; infinite: all at once.
            while_waiting: Called about once a second; what it raises ends the run.
            on_failure: Called before a failed request is reported; may raise what
                explains it better.

        Returns:
            The client's JSON result with details of each request.

        Raises:
            RunError: The client failed, or a request did; the message has its error.

        """
        dataset = self._folder / "prompts.jsonl"
        result = self._folder / "result.json"
        write_dataset(dataset, prompts)
        result.unlink(missing_ok=True)
        self._wait_until_ready()
        arguments = client_arguments(base_url, dataset, len(prompts), output_tokens)
        arguments += ["--request-rate", str(request_rate), "--burstiness", "1000"]
        arguments += ["--result-dir", str(self._folder)]
        self._order([*arguments, "--result-filename", result.name])
        try:
            self._wait(RUN_TIMEOUT_S, while_waiting)
        except BaseException:
            self._end(0.0)  # its answer would come later, to another question
            self._start()
            raise
        record: dict[str, Any] = json.loads(result.read_text())
        # A stream that breaks off is a success of one token for the client.
        if lost := [n for n, tokens in enumerate(record["output_lens"]) if tokens < 2]:
            on_failure()
            error = record["errors"][lost[0]] or "the stream broke off"
            raise RunError(
                f"{len(lost)} of {len(prompts)} requests failed: "
                f"{error.strip().splitlines()[-1]}"
            )
        return record

    @property
    def _log(self) -> Path:
        return self._folder / "client.log"

    def _wait_until_ready(self) -> None:
        if not self._is_ready:
            self._wait(_START_TIMEOUT_S, lambda: None)
            self._is_ready = True

    def _order(self, arguments: list[str]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died; the missing answer says so
            self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
            self._process.stdin.flush()

    def _wait(self, seconds: float, while_waiting: Callable[[], None]) -> None:
        deadline = time.monotonic() + seconds
        while not select.select([self._answers], [], [], _TICK_S)[0]:
            while_waiting()
            if time.monotonic() > deadline:
                raise RunError(f"vllm bench serve took more than {seconds:.0f} s")
        line = self._answers.readline()
        if not line:
            raise RunError(f"vllm bench serve ended:\n{self._log_tail()}")
        if error := json.loads(line).get("error"):
            raise RunError(f"vllm bench serve: {error}")

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])


def client_arguments(
    base_url: str, dataset: Path, num_prompts: int, output_tokens: int
) -> list[str]:
    """Return arguments of `vllm bench serve` for exact prompts and output lengths.

    Token ids go through where the client has no tokenizer; lengths are then told by
    the request's body and counted by the server.
    """
    body = {
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    return [
        "--backend=openai",
        f"--base-url={base_url}",
        f"--model={MODEL_NAME}",
        "--dataset-name=custom",
        f"--dataset-path={dataset}",
        f"--num-prompts={num_prompts}",
        "--disable-shuffle",
        "--no-oversample",
        "--skip-tokenizer-init",
        f"--extra-body={json.dumps(body)}",
        "--ready-check-timeout-sec=0",
        "--disable-tqdm",
        "--save-result",
        "--save-detailed",
    ]
