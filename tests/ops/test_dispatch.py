# SPDX-License-Identifier: Apache-2.0
"""Which implementation runs, and what is said when there is none."""

import os
import subprocess
import sys
from typing import get_args

import pytest
import torch

from polykv_vllm import ops
from polykv_vllm.config import PolyKVConfig
from polykv_vllm.formats import FORMATS
from polykv_vllm.ops import dispatch

FMT = FORMATS["polykv_k8v3"]


def current_isa(forced: str | None) -> subprocess.CompletedProcess[str]:
    """Ask a fresh process, because the choice is made once per process."""
    env = {k: v for k, v in os.environ.items() if k != "POLYKV_CPU_ISA"}
    if forced is not None:
        env["POLYKV_CPU_ISA"] = forced
    code = "from polykv_vllm import ops; print(ops.current_isa())"
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True
    )


def test_the_fastest_is_the_default() -> None:
    available = ops.available_isas()
    assert available[-2:] == ("scalar", "reference")
    assert current_isa(None).stdout.strip() == available[0]
    assert current_isa("").stdout.strip() == available[0]


@pytest.mark.parametrize("isa", ops.available_isas())
def test_forced(isa: str) -> None:
    assert current_isa(isa).stdout.strip() == isa


def test_forcing_what_is_missing_names_what_exists() -> None:
    result = current_isa("avx1024")
    assert result.returncode != 0
    error = result.stderr.strip().splitlines()[-1]
    for word in ("ValueError", "POLYKV_CPU_ISA=avx1024", *ops.available_isas()):
        assert word in error
    assert "this build has no such kernels" in error


def test_forcing_what_the_cpu_lacks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.cpu, "compiled_isas", lambda: ("sve", "scalar"))
    monkeypatch.setenv("POLYKV_CPU_ISA", "sve")
    dispatch.current_isa.cache_clear()
    try:
        with pytest.raises(ValueError, match="sve: this CPU does not have it; avail"):
            dispatch.current_isa()
    finally:
        dispatch.current_isa.cache_clear()


def test_every_compiled_set_can_be_named_in_the_options() -> None:
    names = get_args(PolyKVConfig.model_fields["isa"].annotation)
    assert {"auto", "reference", *ops.compiled_isas()} <= set(names)


def call(op: str, *, isa: str | None = None, device: str = "cpu") -> None:
    """Call an op with fitting shapes."""
    rows = torch.zeros(1, 1, 64, device=device)
    cache = torch.zeros(1, 1, 32, 92, dtype=torch.uint8, device=device)
    number = torch.ones(1, dtype=torch.int32, device=device)
    if op == "reshape_and_cache":
        ops.reshape_and_cache(rows, rows, cache, number.long(), FMT, isa=isa)
    else:
        table, start = number.view(1, 1) - 1, torch.tensor([0, 1]).int()
        ops.paged_attention(
            rows, cache, rows.clone(), table, number, start, FMT, 0.1, isa=isa
        )


@pytest.mark.parametrize("op", ["reshape_and_cache", "paged_attention"])
@pytest.mark.parametrize(
    ("device", "isa"), [("cpu", "sve"), ("meta", "scalar"), ("meta", None)]
)
def test_missing_entry(op: str, device: str, isa: str | None) -> None:
    with pytest.raises(NotImplementedError) as error:
        call(op, isa=isa, device=device)
    words = [op, "polykv_k8v3", "head size 64", device, isa or ops.current_isa()]
    for word in (*words, *(f"cpu/{isa}" for isa in ops.available_isas())):
        assert word in str(error.value)


@pytest.mark.parametrize("op", ["reshape_and_cache", "paged_attention"])
@pytest.mark.parametrize("isa", ops.available_isas())
def test_existing_entries(op: str, isa: str) -> None:
    call(op, isa=isa)


def test_scalar_serves_where_it_is_forced() -> None:
    """The forced kernels are the ones that run, not only the name reported."""
    code = (
        "from polykv_vllm import ops\n"
        "from polykv_vllm.ops import cpu, dispatch\n"
        "taken = []\n"
        "dispatch._table.cache_clear()\n"
        "real = cpu.implementations\n"
        "def spied():\n"
        "    def entry(name, run):\n"
        "        return lambda *args: (taken.append(name), run(*args))[1]\n"
        "    return {k: tuple(entry(k, f) for f in v) for k, v in real().items()}\n"
        "cpu.implementations = spied\n"
        "from tests.ops.test_dispatch import call\n"
        "dispatch._table.cache_clear()\n"
        "call('reshape_and_cache'); call('paged_attention')\n"
        "print(*taken)\n"
    )
    env = {**os.environ, "POLYKV_CPU_ISA": "scalar"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True
    )
    assert result.stdout.split() == ["scalar", "scalar"], result.stderr
