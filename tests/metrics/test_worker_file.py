# SPDX-License-Identifier: Apache-2.0
"""The file between a worker and the front end."""

import subprocess
import sys
from pathlib import Path

import pytest

from polykv_vllm.metrics import worker_file as wf


def test_the_bytes_are_those_of_the_docstring(tmp_path: Path) -> None:
    figures = wf.open_figures(tmp_path, engine=3, rank=12)
    figures[wf.STEPS] = 1.0
    figures[wf.UNSHARED_TOKENS["no_other_reader"]] = 2.0
    figures[wf.GROUPS + len(wf.GROUP_GAUGES)] = 3.0
    raw = (tmp_path / "engine3-rank12.metrics").read_bytes()
    assert len(raw) == wf.FILE_BYTES == 4096
    assert raw[:64] == wf.MAGIC + bytes(56)
    values = memoryview(raw[64:]).cast("d")
    assert {i: v for i, v in enumerate(values) if v} == {0: 1.0, 5: 2.0, 16 + 5: 3.0}
    assert raw.endswith(bytes(wf.FILE_BYTES - 2752))


def test_counters_and_gauges_have_places_of_their_own() -> None:
    counters = [wf.STEPS, wf.ATTENTION_SECONDS, wf.STORE_SECONDS, wf.FOREST_SECONDS]
    counters += [wf.SHARED_TOKENS, *wf.UNSHARED_TOKENS.values()]
    assert sorted(counters) == list(range(len(counters)))
    assert len(counters) <= wf.GROUPS
    last = wf.GROUPS + wf.MAX_GROUPS * len(wf.GROUP_GAUGES)
    assert last <= len(wf.private_figures())


def test_another_process_reads_what_was_written(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from polykv_vllm.metrics import worker_file as wf
figures = wf.open_figures(Path(sys.argv[1]), engine=1, rank=0)
figures[wf.ATTENTION_SECONDS] += 0.25
sys.stdin.readline()
figures[wf.ATTENTION_SECONDS] += 0.5
figures[wf.GROUPS + 4] = 7
print("written", flush=True)
sys.stdin.readline()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as writer:  # type: ignore[call-overload]
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "written\n"
        (worker,) = wf.read_all(tmp_path)  # while the writer lives
        writer.communicate("\n")
    assert (worker.engine, worker.rank) == (1, 0)
    assert worker.values[wf.ATTENTION_SECONDS] == 0.75
    assert worker.groups[0] == wf.GroupGauges(0, 0, 0, 0, 7)
    assert worker.groups[1] == wf.GroupGauges(0, 0, 0, 0, 0)


def test_a_worker_in_a_dead_ones_place_goes_on_counting(tmp_path: Path) -> None:
    wf.open_figures(tmp_path, 0, 0)[wf.STEPS] += 5
    wf.open_figures(tmp_path, 0, 0)[wf.STEPS] += 1
    (worker,) = wf.read_all(tmp_path)
    assert worker.values[wf.STEPS] == 6


def test_workers_come_in_numerical_order_and_nothing_else(tmp_path: Path) -> None:
    for engine, rank in [(0, 10), (0, 9), (1, 0)]:
        wf.open_figures(tmp_path, engine, rank)
    (tmp_path / "lock").touch()
    (tmp_path / ".engine0-rank1.metrics.77").write_bytes(b"half")
    found = [(worker.engine, worker.rank) for worker in wf.read_all(tmp_path)]
    assert found == [(0, 9), (0, 10), (1, 0)]
    assert wf.read_all(tmp_path / "gone") == []


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "engine0-rank0.metrics").write_bytes(b"polykv\0\x63".ljust(4096))
    for use in (lambda: wf.read_all(tmp_path), lambda: wf.open_figures(tmp_path, 0, 0)):
        with pytest.raises(ValueError, match="not a metrics file of this version"):
            use()
