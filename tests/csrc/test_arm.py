# SPDX-License-Identifier: Apache-2.0
"""The NEON kernels, cross-compiled by setup.py itself and run under qemu-user.

A wheel for ARM is built from the same files without edits. What it gives on a small
grid of formats, head sizes and batches is what its scalar kernels give, bit for bit.
"""

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSROOT = Path("/usr/aarch64-linux-gnu")

# The fixture compiles every head size of three kernel tables.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Machine:
    """A program and the library that it is linked with, both for ARM."""

    program: Path
    library: Path

    def run(self, cpu: str) -> subprocess.CompletedProcess[str]:
        """Compare the tables on an emulated CPU."""
        command = [EMULATOR, "-L", str(SYSROOT), "-cpu", cpu, str(self.program)]
        return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Build the extension for ARM as a wheel has it, and the program beside it."""
    if platform.machine() == "aarch64":
        pytest.skip("an ARM machine: the other tests run its kernels")
    missing = [t for t in (COMPILER, EMULATOR) if shutil.which(t) is None]
    if missing or not SYSROOT.is_dir():
        pytest.skip(
            f"{' and '.join(missing) or SYSROOT} not found; Debian, Ubuntu: "
            "apt-get install g++-aarch64-linux-gnu qemu-user"
        )
    folder = tmp_path_factory.mktemp("arm")
    build = [sys.executable, "setup.py", "-q", "build_ext"]
    places = ["--build-lib", str(folder), "--build-temp", str(folder / "objects")]
    environment = {
        "CC": COMPILER.replace("g++", "gcc"),
        "CXX": COMPILER,
        "LDSHARED": f"{COMPILER} -shared",
        # The bits do not depend on it, and -O3 compiles six times as long.
        "CXXFLAGS": "-O1",
    }
    subprocess.run(
        [*build, *places], cwd=ROOT, env={**os.environ, **environment}, check=True
    )
    library = folder / "polykv_vllm" / "_C.so"
    program = folder / "compare_tables"
    source = ROOT / "tests" / "csrc" / "arm" / "compare_tables.cpp"
    include = ROOT / "polykv_vllm" / "csrc" / "include"
    options = ["-std=c++17", "-O1", "-Wall", "-Werror", f"-I{include}"]
    subprocess.run(
        [COMPILER, *options, str(source), str(library), "-o", str(program)], check=True
    )
    return Machine(program, library)


def test_the_library_is_for_arm(machine: Machine) -> None:
    """And it has no text of another architecture's kernels."""
    header = machine.library.read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64


@pytest.mark.parametrize(
    ("cpu", "present"),
    [
        ("max", {"neon_i8mm", "neon"}),
        ("neoverse-n1", {"neon"}),  # dot products, but none of mixed signs
        ("cortex-a72", set()),  # neither: the scalar kernels serve
    ],
)
def test_same_bits_as_the_scalar_kernels(
    machine: Machine, cpu: str, present: set[str]
) -> None:
    done = machine.run(cpu)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert lines.keys() == {"neon_i8mm", "neon"}
    for isa, said in lines.items():
        assert said == ("28 of 28 cases equal" if isa in present else "not on this CPU")
