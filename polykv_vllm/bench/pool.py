# SPDX-License-Identifier: Apache-2.0
"""The servers of all arms: started when needed, standing still when idle.

An idle vLLM worker polls and would take time from the arm that is measured, so a server
whose turn it is not is paused (SIGSTOP). Where memory does not hold all of them, the
one that was used longest ago is stopped first.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from polykv_vllm.bench.arms import FOLDER, Arm
from polykv_vllm.bench.client import MODEL_NAME
from polykv_vllm.bench.cpus import CpuPlan, keep_off_compute
from polykv_vllm.bench.errors import ArmError, BenchError, RunError
from polykv_vllm.bench.scenario import Scenario
from polykv_vllm.server import STARTUP_TIMEOUT_S, ServerError, VllmServer

_PROCESS_BYTES = 2 << 30  # interpreter, torch and buffers of a server's processes
_DEATH_S = 5.0  # what a dying server may take to end
_MEMORY_SHARE = 0.9  # of what is free at the start


@dataclass(frozen=True)
class ServePlan:
    """What all arms have in common.

    Attributes:
        model: What `vllm serve` takes.
        max_model_len: Tokens of the longest request.
        cpus: Where the engine computes, and where everything else runs.
        token_bytes: {arm: cache bytes of a token in all layers}, from the config.
        folder: For the servers' logs.
        port: Of the first server, the next ones count up; None: any free ones.
        startup_timeout_s: How long a server may take until it answers.

    """

    model: str
    max_model_len: int
    cpus: CpuPlan
    token_bytes: Mapping[str, int]
    folder: Path
    port: int | None = None
    startup_timeout_s: float = STARTUP_TIMEOUT_S


def serve_arguments(scenario: Scenario, arm: Arm, plan: ServePlan) -> list[str]:
    """Return what follows `vllm serve` for one arm."""
    return [
        plan.model,
        f"--served-model-name={MODEL_NAME}",
        f"--kv-cache-dtype={arm.cache_dtype}",
        f"--kv-cache-memory-bytes={scenario.cache_mib << 20}",
        f"--block-size={scenario.block_size}",
        f"--max-model-len={plan.max_model_len}",
        f"--max-num-seqs={max(256, *scenario.agents)}",
        f"--max-num-batched-tokens={scenario.max_num_batched_tokens}",
        "--enable-prefix-caching",
        "--enforce-eager",
        "--uvicorn-log-level=warning",
        *(arg.replace(FOLDER, str(plan.folder.absolute())) for arg in arm.serve_args),
        *scenario.serve_args,
    ]


class ServerPool:
    """Context manager: no server is left outside, whatever happens inside.

    Args:
        scenario: Cache size and options of all servers.
        plan: Model, CPUs, logs and ports.
        warm_up: Called with each new server before its first use.

    """

    def __init__(
        self,
        scenario: Scenario,
        plan: ServePlan,
        warm_up: Callable[[VllmServer], None] = lambda server: None,
    ) -> None:
        self._scenario = scenario
        self._plan = plan
        self._warm_up = warm_up
        self._servers: dict[str, VllmServer] = {}  # the one used last comes last
        self._ports: dict[str, int] = {}
        self._server_bytes = server_bytes(scenario, plan.model)
        self._memory_bytes = available_bytes()

    def __enter__(self) -> Self:
        """Check that one server fits.

        Raises:
            BenchError: It does not; the message has both sizes.

        """
        least = self._server_bytes - _PROCESS_BYTES
        if least > self._memory_bytes:
            raise BenchError(
                f"weights and cache need {least / 2**30:.1f} GiB, "
                f"{self._memory_bytes / 2**30:.1f} GiB of memory are free: choose a "
                "smaller model, or a smaller cache with --cache-mib"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name in list(self._servers):
            self.stop(name)

    def command(self, arm: Arm) -> list[str]:
        """Return the command that serves an arm, as a person would type it."""
        return ["vllm", "serve", *serve_arguments(self._scenario, arm, self._plan)]

    @contextmanager
    def serving(
        self, arm: Arm, on_stage: Callable[[str], None] = lambda stage: None
    ) -> Iterator[VllmServer]:
        """Yield the arm's server, ready for requests; all others stand still.

        A server that fails is stopped, so that the next call starts a new one.

        Raises:
            ArmError: It did not start.

        """
        server = self._servers.pop(arm.name, None)
        if server is None:
            self._make_room()
            try:
                server = self._start(arm, on_stage)
            except (ServerError, RunError) as error:
                raise ArmError(str(error)) from error
        self._servers[arm.name] = server
        server.resume()
        try:
            yield server
        except Exception:
            self.stop(arm.name)
            raise
        server.pause()

    def stop(self, name: str) -> None:
        """Stop an arm's server, if it runs."""
        if (server := self._servers.pop(name, None)) is not None:
            server.stop()

    def _make_room(self) -> None:
        fits = int(self._memory_bytes * _MEMORY_SHARE // self._server_bytes)
        while self._servers and len(self._servers) >= fits:
            self.stop(next(iter(self._servers)))

    def _start(self, arm: Arm, on_stage: Callable[[str], None]) -> VllmServer:
        port = self._plan.port
        if port is not None:
            port += self._ports.setdefault(arm.name, len(self._ports))
        server = VllmServer(
            serve_arguments(self._scenario, arm, self._plan),
            self._plan.folder / f"{arm.name}.log",
            {"VLLM_SERVER_DEV_MODE": "1", **self._plan.cpus.environment},
            port,
            self._plan.cpus.all,
        )
        with ExitStack() as on_failure:
            on_failure.enter_context(server)
            server.wait_until_healthy(on_stage, self._plan.startup_timeout_s)
            keep_off_compute(server.process_group, self._plan.cpus)
            on_stage("warming up")
            self._warm_up(server)
            on_failure.pop_all()
        return server


def reset_prefix_cache(server: VllmServer) -> None:
    """Empty the prefix cache, in memory and on disk.

    Raises:
        RunError: vLLM refused, because requests still hold blocks.

    """
    url = f"{server.base_url}/reset_prefix_cache?reset_external=true"
    request = urllib.request.Request(url, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            if json.load(reply)["success"]:
                return
    except (urllib.error.URLError, OSError) as error:
        server.check_alive(_DEATH_S)
        raise ServerError(f"POST {url}: {error}\n{server.log_tail()}") from error
    raise RunError("vLLM did not reset its prefix cache: requests still hold blocks")


def server_bytes(scenario: Scenario, model: str) -> int:
    """Return about how much memory one server takes: weights, cache, processes."""
    weights = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
    return weights + (scenario.cache_mib << 20) + _PROCESS_BYTES


def available_bytes() -> int:
    """Return the memory that new processes may take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
