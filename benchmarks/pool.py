# SPDX-License-Identifier: Apache-2.0
"""What does a prefix on disk save after a restart, and what does writing it cost?

    python -m benchmarks.pool

A server computes a prefix and is killed with -9; the next one, over the same directory,
gets the same prompt as its first. Beside it stands a prompt of the same length that was
never seen, on both servers, so that both ways are measured in the same runs. Further
rounds empty the cache in memory in between; the disk stays.

Then the benchmark of agents (`polykv bench agents disk`) runs the same requests against
a server that writes every full block to disk and one that does not.
"""

import json
import os
import signal
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks import _environment, _pool_overhead, _report
from benchmarks import _options as options
from polykv_vllm.models import DEFAULT_MODEL, build_model
from polykv_vllm.pool.disk.blockfile import HEADER_BYTES, read_block
from polykv_vllm.pool.disk.identity import load_identity
from polykv_vllm.process import group_members
from polykv_vllm.server import VllmServer

BLOCK_SIZE = 32
SPEEDUP = 20.0
READ_SHARE = 0.5
DISK_SHARE = 1.05
NUM_WARM_TOKENS = 40  # of a request that comes first and is not measured
_WRITTEN_S = 60.0  # without one more block on disk


@dataclass(frozen=True)
class Plan:
    """What is measured, and how patiently.

    Attributes:
        model: A directory.
        folder: For blocks and logs.
        num_tokens: Length of the prefix.
        rounds: Restores to measure.
        threads: Compute threads.
        startup_s: How long a server may take until it answers.
        request_s: How long an answer may take.

    """

    model: Path
    folder: Path
    num_tokens: int
    rounds: int
    threads: int
    startup_s: float
    request_s: float

    @property
    def pool(self) -> Path:
        """Where the blocks are kept."""
        return self.folder / "pool"


@dataclass
class Timings:
    """Times to the first token, in seconds, and what was found in the cache."""

    computed_s: list[float] = field(default_factory=list)
    restored_s: list[float] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """Median over median."""
        return statistics.median(self.computed_s) / statistics.median(self.restored_s)


class Client:
    """Sends prompts of token ids to a server.

    Args:
        server: It is healthy.
        timeout_s: How long an answer may take.

    """

    def __init__(self, server: VllmServer, timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Return the seconds to the first token, and how many tokens were cached."""
        body = {"model": "bench", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        start = time.perf_counter()
        reply = self._post("/v1/completions", body)
        seconds = time.perf_counter() - start
        details = reply["usage"].get("prompt_tokens_details") or {}
        return seconds, int(details.get("cached_tokens") or 0)

    def forget(self) -> None:
        """Empty the cache in memory."""
        self._post("/reset_prefix_cache", {})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._server.base_url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
            text = reply.read()
        return json.loads(text) if text else None


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """Return token ids that no other seed begins with."""
    return [1000 + (seed * 7919 + i * i * 31 + i) % 40_000 for i in range(num_tokens)]


def say(words: str) -> None:
    """Print what is being done."""
    _report.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {words}")


@contextmanager
def serving(plan: Plan, name: str) -> Iterator[VllmServer]:
    """Yield a server over the pool, ready for requests."""
    arguments = [
        *(str(plan.model), "--served-model-name", "bench", "--enforce-eager"),
        *("--kv-cache-dtype", "polykv", "--block-size", str(BLOCK_SIZE)),
        *("--kv-cache-memory-bytes", "256M", "--max-model-len", "4096"),
        *("--enable-prompt-tokens-details", "--additional-config"),
        json.dumps({"polykv": {"pool": {"path": str(plan.pool)}}}),
    ]
    cpus = sorted(os.sched_getaffinity(0))[-plan.threads :]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with VllmServer(arguments, plan.folder / f"{name}.log", environment) as server:
        server.wait_until_healthy(lambda s: say(f"{name} server: {s}"), plan.startup_s)
        yield server


def wait_until_written(pool: Path, num_blocks: int) -> None:
    """Return when so many blocks are on disk.

    Raises:
        TimeoutError: There was no new one for a while.

    """
    found, since = 0, time.monotonic()
    while found < num_blocks:
        if (now := len(block_files(pool))) > found:
            found, since = now, time.monotonic()
        elif time.monotonic() - since > _WRITTEN_S:
            raise TimeoutError(f"only {found} of {num_blocks} blocks were written")
        time.sleep(0.05)


def block_files(pool: Path) -> list[Path]:
    """Return the files of all blocks."""
    return sorted(pool.glob("ranks/*/??/" + "[0-9a-f]" * 64))


def drop_from_memory(files: list[Path]) -> None:
    """Have the system forget files, so that they are read from disk again."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_rate(pool: Path) -> float:
    """Return the bytes per second of reading and checking every file, cold."""
    files = block_files(pool)
    identity = load_identity(files[0].parent.parent)
    assert identity is not None
    payload = bytearray(files[0].stat().st_size - HEADER_BYTES)
    drop_from_memory(files)
    start = time.perf_counter()
    for path in files:
        read_block(path, identity.digest, bytes.fromhex(path.name), memoryview(payload))
    return len(files) * len(payload) / (time.perf_counter() - start)


def kill(server: VllmServer) -> None:
    """Kill every process of a server with -9."""
    for process in group_members(server.process_group):
        os.kill(process, signal.SIGKILL)


def measure(plan: Plan) -> dict[str, Any]:
    """Run both servers; returns times, rates and sizes."""
    timings, known = Timings(), prompt_of(0, plan.num_tokens + 1)
    with serving(plan, "first") as server:
        client = Client(server, plan.request_s)
        client.first_token(prompt_of(98, NUM_WARM_TOKENS))
        timings.computed_s.append(_timed(client, known, 0))
        wait_until_written(plan.pool, plan.num_tokens // BLOCK_SIZE)
        say("kill -9")
        kill(server)
    files = block_files(plan.pool)
    drop_from_memory(files)
    with serving(plan, "second") as server:
        client = Client(server, plan.request_s)
        client.first_token(prompt_of(99, NUM_WARM_TOKENS))
        for number in range(plan.rounds):
            drop_from_memory(files)
            timings.restored_s.append(_timed(client, known, plan.num_tokens))
            unknown = prompt_of(number + 1, plan.num_tokens + 1)
            timings.computed_s.append(_timed(client, unknown, 0))
            time.sleep(1.0)  # until its blocks are written
            client.forget()
        restored = _restored(server.metrics())
    slot_bytes = restored["disk_bytes"] / restored["disk_blocks"] / BLOCK_SIZE
    payload = files[0].stat().st_size - HEADER_BYTES
    return {
        "timings": vars(timings),
        "speedup": timings.speedup,
        "restore_rate": restored["restored"] * payload / restored["restore_us"] * 1e6,
        "read_rate": read_rate(plan.pool),
        "disk_bytes_per_token": slot_bytes,
        "cache_bytes_per_token": payload / BLOCK_SIZE,
    }


def _timed(client: Client, prompt: list[int], expected: int) -> float:
    """Return the seconds to the first token of a prompt that is cached so far."""
    seconds, cached = client.first_token(prompt)
    if cached != expected:
        raise ValueError(f"{cached} tokens were found in the cache, not {expected}")
    say(f"{len(prompt)} tokens, {cached} of them cached: {seconds:.2f} s")
    return seconds


def _restored(metrics: str) -> dict[str, float]:
    """Return our counters and gauges of the store."""
    found = {}
    for line in metrics.splitlines():
        if line.startswith("vllm:polykv_pool_"):
            name = line.split("{")[0].removeprefix("vllm:polykv_pool_")
            found[name.removesuffix("_total")] = float(line.rsplit(" ", 1)[1])
    return found


def show(result: dict[str, Any], num_tokens: int) -> None:
    """Print what was measured beside what is required."""
    timings = result["timings"]
    table = Table(title=f"A prefix of {num_tokens} tokens after kill -9 and a restart")
    for heading in ("", "measured", "required"):
        table.add_column(heading, justify="left" if not heading else "right")
    ms = _report.milliseconds
    computed = statistics.median(timings["computed_s"])
    table.add_row("first token, computed", f"{ms(computed)} ms", "")
    first, *_ = timings["restored_s"]
    table.add_row("first token, first request after the restart", f"{ms(first)} ms", "")
    restored = statistics.median(timings["restored_s"])
    table.add_row("first token, from disk, median", f"{ms(restored)} ms", "")
    table.add_row(
        "computed / restored", _report.ratio(result["speedup"], SPEEDUP), f"{SPEEDUP}x"
    )
    share = result["restore_rate"] / result["read_rate"]
    table.add_row("restoring", f"{result['restore_rate'] / 1e6:.0f} MB/s", "")
    table.add_row(
        "reading and checking alone",
        f"{result['read_rate'] / 1e6:.0f} MB/s",
        f"restoring at least {READ_SHARE:.0%} of it ({share:.0%})",
    )
    on_disk = result["disk_bytes_per_token"] / result["cache_bytes_per_token"]
    table.add_row(
        "bytes on disk / in the cache", f"{on_disk:.3f}", f"at most {DISK_SHARE}"
    )
    _report.console.print(table)


def main(
    tokens: Annotated[
        int, typer.Option(help="length of the prefix, a multiple of 32", min=32)
    ] = 3072,
    rounds: Annotated[int, typer.Option(help="restores to measure", min=1)] = 5,
    repetitions: Annotated[
        int, typer.Option(help="of the agents with and without a disk; 0: none", min=0)
    ] = 5,
    agents: Annotated[int, typer.Option(help="agents at once", min=1)] = 15,
    startup_timeout: Annotated[
        float, typer.Option(help="seconds until a server must answer", min=1)
    ] = 900.0,
    request_timeout: Annotated[
        float, typer.Option(help="seconds until a request must be answered", min=1)
    ] = 600.0,
    threads: options.Threads = 1,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="write the results here")
    ] = None,
) -> None:
    """Measure what a prefix on disk saves after a restart, and what writing costs."""
    if tokens % BLOCK_SIZE:
        raise typer.BadParameter(f"{tokens} is not a multiple of {BLOCK_SIZE}")
    environment = _environment.describe(threads)
    _report.print_headline(environment)
    with tempfile.TemporaryDirectory() as folder:
        patience = (startup_timeout, request_timeout)
        model = build_model(DEFAULT_MODEL)
        plan = Plan(model, Path(folder), tokens, rounds, threads, *patience)
        result = measure(plan)
        show(result, tokens)
        if repetitions:
            load = _pool_overhead.Load(agents, tokens, repetitions, threads)
            overhead = _pool_overhead.measure(load, Path(folder), startup_timeout)
            _pool_overhead.show(overhead, load)
            result["overhead"] = overhead
    _report.write_json(json_path, {"environment": environment} | result)


if __name__ == "__main__":
    typer.run(main)
