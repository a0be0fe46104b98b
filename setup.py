# SPDX-License-Identifier: Apache-2.0
"""Builds ``polykv_vllm/_C.so``; all metadata is in pyproject.toml.

The kernels are one plain shared library with C linkage, loaded through ctypes. It
uses neither Python's nor torch's C++ API, so one wheel serves every Python version
and every torch build of its platform.
"""

import os
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CSRC = Path("polykv_vllm") / "csrc"

# -ffp-contract=off: the scalar and SIMD kernels promise equal bits, so the compiler
# may not fuse a multiply and an add in one of them only. No -m flags: each kernel
# file names its own instruction set, and the set is chosen at run time.
# The -Wno flags: GCC 12 warns of its own AVX-512 headers (GCC bug 105593), and of
# vectors passed between functions that are all inlined.
COMPILE_ARGS = [
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-ffp-contract=off",
    "-g0",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-Wno-psabi",
]
LINK_ARGS = ["-fopenmp", "-g0"]

# Per source. The plain C++ serves CPUs that no other table does, and specifies the
# results: -O2 compiles it in a third of -O3's three minutes.
SOURCE_ARGS = {"kernels_scalar.cpp": ["-O2"]}

COMPILER_MISSING = """
polykv-vllm needs a C++17 compiler with OpenMP to build its CPU kernels, and
'{compiler}' was not found. Install one and try again:
    Debian, Ubuntu:  apt-get install g++
    Fedora, RHEL:    dnf install gcc-c++
or name yours:       CXX=/path/to/g++ pip install ...
"""


class BuildKernels(build_ext):
    """Compiles the kernels and names the result without Python's version tag."""

    def get_ext_filename(self, ext_name: str) -> str:
        """Return ``polykv_vllm/_C.so``: the library has no Python ABI to name."""
        return str(Path(*ext_name.split("."))) + ".so"

    def build_extensions(self) -> None:
        """Stop with a readable message when no C++ compiler is installed."""
        compiler = self.compiler.compiler_so_cxx[0]
        if shutil.which(compiler) is None:
            raise SystemExit(COMPILER_MISSING.format(compiler=compiler))
        self.compiler.compile = self._on_all_cpus(self.compiler.compile)
        super().build_extensions()

    def _on_all_cpus(self, compile_files):
        """Return a `CCompiler.compile` that has as many compilers running as CPUs.

        Every instruction set is one source, and takes a minute.
        """

        # The caller's own flags come last, and so win over the ones above.
        own = shlex.split(os.environ.get("CXXFLAGS", ""))

        def compile_one(source, extra_postargs, **options):
            args = [*extra_postargs, *SOURCE_ARGS.get(Path(source).name, []), *own]
            return compile_files([source], extra_postargs=args, **options)

        def compile_all(sources, **options):
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                done = pool.map(lambda each: compile_one(each, **options), sources)
                return [name for names in done for name in names]

        return compile_all


class PlatformWheel(bdist_wheel):
    """Tags the wheel ``py3-none-<platform>``."""

    def get_tag(self) -> tuple[str, str, str]:
        """Keep the platform tag only."""
        return "py3", "none", super().get_tag()[2]


SLOWEST = ("kernels_avx512.cpp", "kernels_avx2.cpp", "kernels_avx512bw.cpp")


def by_duration(source: str) -> tuple[bool, str]:
    """Sort the slowest first: begun last, one would keep a CPU waiting for minutes."""
    return Path(source).name not in SLOWEST, source


KERNELS = Extension(
    "polykv_vllm._C",
    sources=sorted(map(str, CSRC.rglob("*.cpp")), key=by_duration),
    depends=sorted(str(path) for path in CSRC.rglob("*.h")),
    include_dirs=[str(CSRC), str(CSRC / "include")],
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=LINK_ARGS,
    language="c++",
)

setup(
    ext_modules=[KERNELS] if KERNELS.sources else [],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
