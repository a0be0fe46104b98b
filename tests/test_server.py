# SPDX-License-Identifier: Apache-2.0
"""No process of the server outlives its owner, whatever ends it.

A script takes vLLM's place: like it, it starts a child process and serves /health.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from polykv_vllm import process as process_module
from polykv_vllm import server as server_module
from polykv_vllm.process import group_members
from polykv_vllm.server import ServerError, VllmServer

STAND_IN = """
import http.server, signal, subprocess, sys, time
behaviour, port = sys.argv[1], int(sys.argv[2])
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(child)
print("Starting to load model", flush=True)
if behaviour == "fails":
    sys.exit("no such cache dtype")
if behaviour == "hangs":
    time.sleep(600)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"metrics")
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


class StandIn(VllmServer):
    """`VllmServer` around the script; the argument is how the script behaves."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", STAND_IN, *self._arguments, str(self.port)]


def _wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def test_serves_inside_and_nothing_is_left_outside(tmp_path: Path) -> None:
    stages: list[str] = []
    with StandIn(["well"], tmp_path / "log") as server:
        server.wait_until_healthy(stages.append)
        assert server.metrics() == "metrics"
        assert len(group_members(server.process_group)) == 2
        assert server.process_group != os.getpgrp()
    assert group_members(server.process_group) == []
    assert "loading the weights" in stages or stages == ["importing vLLM"]


def test_process_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_TERMINATE_TIMEOUT_S", 0.5)
    with StandIn(["stubborn"], tmp_path / "log") as server:
        server.wait_until_healthy()
    assert group_members(server.process_group) == []


def test_start_failure_shows_the_log_and_ends_the_children(tmp_path: Path) -> None:
    server = StandIn(["fails"], tmp_path / "log")
    with pytest.raises(ServerError, match=r"(?s)exit 1.*no such cache dtype"), server:
        server.wait_until_healthy()
    assert group_members(server.process_group) == []


def test_start_that_hangs_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STARTUP_TIMEOUT_S", 1.0)
    server = StandIn(["hangs"], tmp_path / "log")
    with (
        pytest.raises(ServerError, match=r"(?s)not ready within 1 s.*load model"),
        server,
    ):
        server.wait_until_healthy()
    assert group_members(server.process_group) == []


def test_error_inside_is_passed_on_after_the_stop(tmp_path: Path) -> None:
    server = StandIn(["well"], tmp_path / "log")
    with pytest.raises(ZeroDivisionError), server:
        server.wait_until_healthy()
        raise ZeroDivisionError
    assert group_members(server.process_group) == []


def _states(group: int) -> set[str]:
    """Return the states of all processes of a group: S sleeps, T is stopped."""
    stats = [Path(f"/proc/{pid}/stat").read_text() for pid in group_members(group)]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def test_paused_server_stands_still_and_goes_on(tmp_path: Path) -> None:
    with StandIn(["well"], tmp_path / "log") as server:
        server.wait_until_healthy()
        server.pause()
        _wait_for(lambda: _states(server.process_group) == {"T"})
        server.resume()
        assert server.metrics() == "metrics"
        server.pause()
    assert group_members(server.process_group) == []


def test_killed_owner_leaves_no_paused_server(tmp_path: Path) -> None:
    owner_script = f"""
import time
from pathlib import Path
from tests.test_server import StandIn
with StandIn(["well"], Path({str(tmp_path / "log")!r})) as server:
    server.wait_until_healthy()
    server.pause()
    print(server.process_group, flush=True)
    time.sleep(600)
"""
    command = [sys.executable, "-c", owner_script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        group = int(owner.stdout.readline())
        owner.kill()
        owner.wait(30)
    _wait_for(lambda: not group_members(group))


def test_port_in_use_is_an_error_before_the_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((server_module.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} .* is in use"):
            StandIn(["well"], tmp_path / "log", port=port).__enter__()
    assert not (tmp_path / "log").exists()


def test_environment_and_cpus_reach_the_server(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    with StandIn(
        ["well"], tmp_path / "log", environment={"POLYKV_TEST": "1"}, cpus=[cpu]
    ) as server:
        server.wait_until_healthy()
        leader = Path(f"/proc/{server.process_group}")
        assert b"POLYKV_TEST=1" in (leader / "environ").read_bytes()
        assert os.sched_getaffinity(server.process_group) == {cpu}


def test_dead_server_is_explained_by_its_first_error(tmp_path: Path) -> None:
    lines = [
        "(APIServer) WARNING errors like `OSError: too many files`",
        "(EngineCore) ERROR [core.py:1510] vllm.x.DeadError: the cache is too small",
        *["traceback"] * 40,
        "RuntimeError: the engine failed",
        *[' - leaked type "x"'] * 40,
    ]
    log = tmp_path / "log"
    with StandIn(["well"], log) as server:
        server.wait_until_healthy()
        server.check_alive()
        log.write_text("\n".join(lines))
        os.killpg(server.process_group, signal.SIGKILL)
        _wait_for(lambda: not group_members(server.process_group))
        with pytest.raises(
            ServerError,
            match=r"(?s)died, exit -9:\nvllm.x.DeadError: .*too small.*engine failed",
        ):
            server.check_alive()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signal_to_the_owner(tmp_path: Path, number: signal.Signals) -> None:
    owner_script = f"""
import time
from pathlib import Path
from polykv_vllm.process import signals_unwind
from tests.test_server import StandIn
with signals_unwind(), StandIn(["well"], Path({str(tmp_path / "log")!r})) as server:
    server.wait_until_healthy()
    print(server.process_group, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", owner_script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        group = int(owner.stdout.readline())
        leader_only = number is signal.SIGKILL
        owner.send_signal(number)
        owner.wait(30)
    # Killed outright, the owner can do nothing: the kernel ends the leader, and vLLM
    # ends its own children then, which the stand-in does not.
    if leader_only:
        _wait_for(lambda: group not in group_members(group))
        os.killpg(group, signal.SIGKILL)
    _wait_for(lambda: not group_members(group))
