# SPDX-License-Identifier: Apache-2.0
"""The attention benchmark checks before it times, and its quick mode works."""

import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

pytest.importorskip("vllm")

from benchmarks import _vllm_library, attention
from benchmarks._cases import Case, Shape
from polykv_vllm import ops
from polykv_vllm.formats import CACHE_DTYPES, get_format

_QUICK = ["--quick", "--shape", "4/2/64"]


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(attention.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def wrong_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernel with a softmax scale that is off by 5 %."""
    right = ops.layer_attention

    def wrong(fmt: Any, scale: float, **options: Any) -> Any:
        return right(fmt, scale * 1.05, **options)

    monkeypatch.setattr(ops, "layer_attention", wrong)


def test_quick_mode_prints_ratios_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "attention.json"
    result = run(*_QUICK, "--json", str(path))
    assert result.exit_code == 0, result.output
    assert re.search(r"\d\.\d\dx", result.output)
    record = json.loads(path.read_text())
    assert record["environment"]["threads"] == 1
    assert len(record["results"]) == 3
    for each in record["results"]:
        assert not each["failed"]
        ours = [name for name in each["timings"] if name.startswith("polykv")]
        assert ours and all(each["timings"][name]["median_s"] > 0 for name in ours)
        for name in ours:
            fast = name.endswith("fast")
            bound = attention.MAX_FAST_ERROR if fast else attention.MAX_ERROR
            assert each["errors"][name] <= bound
    many = record["results"][-1]["timings"]
    for variant in ("", " fast", " unshared"):
        assert f"polykv {ops.current_isa()}{variant}" in many


@pytest.mark.usefixtures("wrong_attention")
def test_failing_refcheck_prints_no_time(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    result = run(*_QUICK, "--json", str(path))
    assert result.exit_code == 1
    assert "refcheck failed" in result.output
    assert not re.search(r"\d\.\d\dx", result.output)
    for each in json.loads(path.read_text())["results"]:
        assert each["failed"] and not each["timings"] and not each["ratios"]


def test_nan_fails_the_refcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "layer_attention", lambda *_, **__: lambda *_: None)
    isas = attention.our_isas()[:1]
    case = Case(Shape(4, 2, 64), 200)
    arms = attention.make_arms(case, get_format("polykv"), isas, threads=1)
    result = attention.measure(case, arms, seconds=0, footprint_bytes=0)
    assert result.failed == (f"polykv {isas[0]}",)
    assert not result.timings


@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_every_format_passes_the_refcheck(name: str) -> None:
    case = Case(Shape(6, 2, 128), 333, query_len=3, agents=2)
    isas = attention.our_isas()
    arms = attention.make_arms(case, get_format(name), isas, threads=1)
    assert attention.refcheck(arms)[1] == ()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--format", "polykv_k1v1"],
        ["--shape", "9/2/64"],
        ["--cpu-time", "--threads=2"],
        ["--isa=x"],
        ["--vllm-library=mmx"],
    ],
)
def test_bad_options_are_usage_errors(arguments: list[str]) -> None:
    assert run("--quick", *arguments).exit_code == 2


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="libraries for x86-64")
def test_beside_another_library_of_vllm(tmp_path: Path) -> None:
    """In a process of its own: this one may hold vLLM's usual kernels."""
    if "avx2" not in ops.available_isas():
        pytest.skip("this CPU has no AVX2")
    path = tmp_path / "avx2.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.attention",
        *_QUICK,
        "--json",
        str(path),
    ]
    done = subprocess.run(
        [*command, "--vllm-library", "avx2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    assert record["vllm_library"] == "avx2"
    for each in record["results"]:
        assert not each["failed"]
        arms = {
            name.removesuffix(" fast").removesuffix(" unshared")
            for name in each["timings"]
        }
        assert arms == {"polykv avx2", "vLLM AVX2"}


def test_a_library_comes_before_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", sys)
    with pytest.raises(RuntimeError, match="already loaded"):
        _vllm_library.take("avx2")
