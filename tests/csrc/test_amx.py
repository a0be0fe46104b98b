# SPDX-License-Identifier: Apache-2.0
"""The AMX products on emulated tiles, for machines whose CPU has none.

Twice the same program: with gemm_amx.h, its instructions replaced by plain C++ that do
the same, and with gemm_scalar.h. Attention gives the same, bit for bit.
On a CPU with AMX the other tests of this folder run the instructions themselves.
"""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "amx" / "attend.cpp"
CSRC = Path(__file__).parents[2] / "polykv_vllm" / "csrc"
# As setup.py has it: a fused multiply-add would be another rounding.
OPTIONS = ["-O1", "-std=c++17", "-ffp-contract=off", "-Wall"]
# Rows of one head size: formats, widths of probabilities, windows, lengths.
ROWS = 3 * 2 * 2 * 4 * sum((1, 5, 8, 9, 16, 17, 33, 64))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the states that each program writes."""
    if shutil.which("g++") is None:
        pytest.skip("g++ not found")
    folder = tmp_path_factory.mktemp("amx")

    def run(name: str) -> bytes:
        defines = ["-DEMULATED_TILES"] if name == "amx" else []
        includes = [f"-I{CSRC}", f"-I{CSRC / 'include'}"]
        program = str(folder / name)
        command = ["g++", *OPTIONS, *defines, *includes, str(SOURCE), "-o", program]
        built = subprocess.run(command, capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        done = subprocess.run([program], capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    names = ("amx", "scalar")
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


def test_emulated_tiles_give_the_bits_of_the_scalar_kernel(
    outputs: dict[str, bytes],
) -> None:
    numbers = ROWS * sum(head_dim + 2 for head_dim in (64, 128))
    assert len(outputs["scalar"]) == 4 * numbers
    assert outputs["amx"] == outputs["scalar"]


def test_what_is_compared_is_not_empty(outputs: dict[str, bytes]) -> None:
    """Most numbers are others than their neighbours, and none is 0 or NaN for all."""
    import numpy

    numbers = numpy.frombuffer(outputs["scalar"], dtype=numpy.float32)
    assert numpy.isfinite(numbers).all()
    assert len(numpy.unique(numbers)) > 0.9 * len(numbers)
