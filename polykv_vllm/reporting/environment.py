# SPDX-License-Identifier: Apache-2.0
"""What a figure depends on: the CPU, its load, the versions, the commit."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
)
_PACKAGES = ("polykv-vllm", "vllm", "torch")
_ROOT = Path(__file__).resolve().parents[2]
_CACHE_SIZES = "/sys/devices/system/cpu/cpu0/cache"


def describe(threads: int) -> dict[str, Any]:
    """Return the record that every JSON report carries.

    Args:
        threads: Compute threads of the measured code.

    """
    cpu = _cpuinfo()
    flags = set(cpu.get("flags", "").split())
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu.get("model name", platform.processor() or platform.machine()),
        "cpu_family_model": f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}",
        "cpu_flags": [flag for flag in _FLAGS if flag in flags],
        "last_level_cache_bytes": last_level_cache_bytes(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "threads": threads,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
    }


def last_level_cache_bytes(root: str = _CACHE_SIZES) -> int:
    """Size of the largest CPU cache as Linux reports it; 0 where it does not."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [0]
    for path in Path(root).glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes)


def headline(environment: dict[str, Any]) -> str:
    """Return `environment` in two lines for the terminal."""
    versions = ", ".join(
        f"{name} {number}" for name, number in environment["versions"].items()
    )
    return (
        f"{environment['cpu']} ({' '.join(environment['cpu_flags'])}), "
        f"{environment['threads']} thread(s), load {environment['load_1min']}\n"
        f"{versions}, commit {environment['commit']}"
    )


def _cpuinfo() -> dict[str, str]:
    """Return the first processor's entries of /proc/cpuinfo; empty where it lacks."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the short commit, with a mark when package or benchmarks differ.

    An installed package has none, even where it lies below somebody's checkout.
    """
    if not (_ROOT / ".git").exists():
        return "unknown"

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_ROOT), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "polykv_vllm", "benchmarks")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
