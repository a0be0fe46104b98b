# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark refuses to run where it cannot; its compiler reads listings."""

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu_compile import SAMPLE, Case, Resources, _innermost_loop, table


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_interpreter_has_to_be_asked_for() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    done = run("--interpret")
    assert done.returncode == 1
    assert "--interpret needs TRITON_INTERPRET=1" in done.stderr


def test_without_a_gpu() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run()
    assert done.returncode == 1
    assert "no CUDA GPU is available" in done.stderr


def test_the_loop_that_multiplies_is_counted() -> None:
    listing = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   IADD3 R0, R0, 0x1, RZ ;
        /*0020*/              @P0  BRA `(.L_x_1) ;
.L_x_2:
        /*0030*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0040*/                   IMMA.16832.S8.S8 R8, R4.ROW, R6.COL, R8 ;
        /*0050*/              @P1  BRA `(.L_x_2) ;
        /*0060*/                   BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
"""
    assert _innermost_loop(listing) == (3, 1)


def test_the_sample_has_every_format_and_architecture() -> None:
    assert {case.fmt for case in SAMPLE if case.kernel == "attend"} == {
        "polykv_k8v3",
        "polykv_k7v4",
        "polykv_k8v8",
        "polykv_k8v4",
    }
    assert {case.capability for case in SAMPLE} == {75, 80, 86, 90}


def test_the_table_has_a_row_for_each_case() -> None:
    case = Case("attend", "polykv_k8v3", 128, 90, 8)
    text = table([(case, Resources(240, 0, 13472, 1, 1615, 64, 1.0))])
    row = "| attend | polykv_k8v3 | 128 | 90 | 8 | 1 | 240 | 0 | 13472 | 1615 | 64 |"
    assert row in text.splitlines()
