# SPDX-License-Identifier: Apache-2.0
"""Servers of all arms: options, memory, and what happens when one fails.

The stand-in of tests/test_server.py takes vLLM's place.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from polykv_vllm.bench import pool as pool_module
from polykv_vllm.bench.arms import ARMS, arm_named
from polykv_vllm.bench.cpus import plan_cpus
from polykv_vllm.bench.errors import ArmError, BenchError
from polykv_vllm.bench.pool import ServePlan, ServerPool, serve_arguments, server_bytes
from polykv_vllm.process import group_members
from polykv_vllm.server import ServerError
from tests.bench.records import SCENARIO
from tests.test_server import STAND_IN, StandIn

STOCK, POLYKV = arm_named("stock"), arm_named("polykv")


class Stubs(StandIn):
    """A stand-in that behaves well, or as the test says."""

    behaviour = "well"

    @property
    def command(self) -> list[str]:
        return [*super().command[:2], STAND_IN, self.behaviour, str(self.port)]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServePlan:
    monkeypatch.setattr(pool_module, "VllmServer", Stubs)
    monkeypatch.setattr(Stubs, "behaviour", "well")
    return ServePlan("tiny", 4096, plan_cpus(1), {}, tmp_path)


def stands_still(server: StandIn) -> bool:
    """Whether the server is stopped, now or in a moment."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{server.process_group}/stat").read_text()
        if stat.rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.02)
    return False


def test_arms_differ_in_what_they_should_only(plan: ServePlan) -> None:
    arguments = {n: set(serve_arguments(SCENARIO, a, plan)) for n, a in ARMS.items()}
    common = set.intersection(*arguments.values())
    assert {"--enable-prefix-caching", "--block-size=128"} <= common
    assert f"--kv-cache-memory-bytes={256 << 20}" in common
    assert arguments["stock"] - common == {"--kv-cache-dtype=auto"}
    assert arguments["polykv-unshared"] - arguments["polykv"] == {
        "--additional-config",
        '{"polykv": {"prefix_sharing": false}}',
    }


def test_idle_servers_stand_still_and_none_is_left(plan: ServePlan) -> None:
    with ServerPool(SCENARIO, plan) as pool:
        with pool.serving(STOCK) as stock:
            assert stock.metrics() == "metrics"
        assert stands_still(stock)
        with pool.serving(POLYKV) as polykv:
            assert stands_still(stock)
        with pool.serving(STOCK) as again:
            assert again is stock
            assert again.metrics() == "metrics"
    assert not group_members(stock.process_group)
    assert not group_members(polykv.process_group)


def test_without_memory_the_oldest_server_goes(
    plan: ServePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = server_bytes(SCENARIO, plan.model)
    monkeypatch.setattr(pool_module, "available_bytes", lambda: int(1.5 * one))
    with ServerPool(SCENARIO, plan) as pool:
        with pool.serving(STOCK) as stock:
            pass
        with pool.serving(POLYKV):
            assert not group_members(stock.process_group)


def test_model_that_does_not_fit_says_how_much_is_missing(
    plan: ServePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "available_bytes", lambda: 100 << 20)
    pool = ServerPool(SCENARIO, plan)
    with pytest.raises(BenchError, match=r"0\.2 GiB, 0\.1 GiB .*--cache-mib"):
        pool.__enter__()


def test_arm_that_does_not_start_keeps_the_others(
    plan: ServePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServerPool(SCENARIO, plan) as pool:
        with pool.serving(STOCK) as stock:
            pass
        monkeypatch.setattr(Stubs, "behaviour", "fails")
        with (
            pytest.raises(ArmError, match="no such cache dtype"),
            pool.serving(POLYKV),
        ):
            pass
        with pool.serving(STOCK) as again:
            assert again is stock


def test_warm_up_that_fails_leaves_no_server(plan: ServePlan) -> None:
    groups = []

    def fail(server: StandIn) -> None:
        groups.append(server.process_group)
        raise ServerError("it died")

    with ServerPool(SCENARIO, plan, fail) as pool:  # type: ignore[arg-type]
        with pytest.raises(ArmError, match="it died"), pool.serving(STOCK):
            pass
        assert not group_members(groups[0])


def test_failed_server_is_started_anew(plan: ServePlan) -> None:
    with ServerPool(SCENARIO, plan) as pool:
        with pytest.raises(ServerError), pool.serving(STOCK) as first:
            os.killpg(first.process_group, signal.SIGKILL)
            raise ServerError("it died")
        with pool.serving(STOCK) as second:
            assert second.metrics() == "metrics"
            assert second.process_group != first.process_group


def test_ports_count_up_from_the_one_asked_for(plan: ServePlan) -> None:
    with StandIn(["well"], plan.folder / "probe.log") as probe:
        port = probe.port
    moved = ServePlan("tiny", 4096, plan.cpus, {}, plan.folder, port)
    with ServerPool(SCENARIO, moved) as pool:
        with pool.serving(STOCK) as stock:
            assert stock.port == port
        with pool.serving(POLYKV) as polykv:
            assert polykv.port == port + 1
