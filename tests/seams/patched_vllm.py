# SPDX-License-Identifier: Apache-2.0
"""A copy of the installed vLLM with `patches/` applied."""

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "patches" / "vllm-0.32.0"


def installed() -> Path:
    """The directory that contains the installed package `vllm`."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def patch(directory: Path) -> dict[str, str]:
    """Make the copy; returns the environment of a process that imports it.

    Python files are copied, the rest is linked: the libraries are large.
    """
    shutil.copytree(installed() / "vllm", directory / "vllm", copy_function=_copy)
    for path in sorted(PATCHES.glob("*.patch")):
        done = subprocess.run(
            ["patch", "-p1", "--fuzz=0", "--input", str(path)],
            cwd=directory,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "offset" not in done.stdout
    return {**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"}


def _copy(source: str, target: str) -> None:
    if source.endswith(".py"):
        shutil.copyfile(source, target)
    elif not source.endswith(".pyc"):
        os.symlink(source, target)
