# SPDX-License-Identifier: Apache-2.0
"""Set-up stops early, with a message that says what to install."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALLER = ROOT / "packaging" / "install.sh"


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with the usual tools, but without Python and without a compiler."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "uname", "df", "awk"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    return tools


def _install(path: Path, venv: Path, **environment: str) -> str:
    done = subprocess.run(
        [INSTALLER, str(venv)],
        env={"PATH": str(path), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert not venv.exists()
    return done.stderr


def test_python_is_missing(bare_path: Path, tmp_path: Path) -> None:
    message = _install(bare_path, tmp_path / "venv")
    assert "Python 3.11 to 3.14 is needed" in message
    assert "apt-get install python3" in message


def test_python_is_too_old(bare_path: Path, tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text("#!/bin/bash\nexit 1\n")  # as its version check would answer
    old.chmod(0o755)
    assert str(old) in _install(bare_path, tmp_path / "venv", PYTHON=str(old))


def test_compiler_is_missing(bare_path: Path, tmp_path: Path) -> None:
    (bare_path / "python3").symlink_to(sys.executable)
    message = _install(bare_path, tmp_path / "venv")
    assert "C++ compiler 'g++' was not found" in message
    assert "apt-get install g++" in message


def test_build_without_a_compiler_says_what_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "CXX": "no-such-compiler", "CC": "no-such-compiler"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "'no-such-compiler' was not found" in done.stderr
    assert "apt-get install g++" in done.stderr


def test_make_help_names_the_targets() -> None:
    done = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for target in ("setup", "demo", "test", "lint", "format", "bench", "clean"):
        assert f"make {target}" in done.stdout
