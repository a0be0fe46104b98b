# SPDX-License-Identifier: Apache-2.0
"""The patches are what the seams would write, and a patched vLLM is recognised."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polykv_vllm.errors import SeamError
from polykv_vllm.formats import CACHE_DTYPES
from polykv_vllm.seams import registry
from polykv_vllm.seams.patched import polykv_seam
from polykv_vllm.seams.patches import write_patches
from polykv_vllm.seams.source import SourceTree
from tests.seams.patched_vllm import PATCHES, ROOT, installed, patch

pytestmark = pytest.mark.skipif(
    registry.vllm_version() != "0.32.0" or shutil.which("patch") is None,
    reason="needs vLLM 0.32.0, which the patches are for, and the program patch",
)
PATCHED = (
    "kv_cache_dtype",
    "attention_backend",
    "layer_cache_dtype",
    "key_treatment",
    "prefix_pool",
    "pool_requests",
    "pool_reset",
    "cache_salt",
    "window_memory",
    "window_pages",
    "window_steps",
    "engine_config",
)


def test_the_series_is_up_to_date(tmp_path: Path) -> None:
    """Otherwise: python -m polykv_vllm.seams --write-patches patches/vllm-0.32.0"""
    count = write_patches(registry.SEAMS, SourceTree(installed()), tmp_path)
    assert count == len(PATCHED)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in PATCHES.glob("*.patch"))
    for name in names:
        assert (PATCHES / name).read_text() == (tmp_path / name).read_text()


@pytest.mark.parametrize("name", PATCHED)
def test_a_patch_says_what_it_is_for(name: str) -> None:
    (path,) = PATCHES.glob(f"*-{name}.patch")
    header = re.sub(r"\n  ", " ", path.read_text().split("\n--- ")[0])
    (seam,) = [s for s in registry.SEAMS if s.name == name]
    for line in (
        f"Why: {seam.why}",
        f"Upstream: {seam.upstream}",
        f"Remove when: {seam.remove_when}",
        f"Seam: polykv_vllm/seams/{name}.py",
    ):
        assert line in header
    assert (ROOT / "polykv_vllm" / "seams" / f"{name}.py").exists()


def test_a_patched_vllm_has_the_seams(tmp_path: Path) -> None:
    """The plugin finds them present, adds the rest, and cannot remove them."""
    environment = patch(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "polykv_vllm.seams"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    states = dict(re.findall(r"^(\w+): (.+)$", done.stdout, flags=re.M))
    # What the scheduler's seam does needs no patch, and Prometheus is not vLLM.
    rest = {"scheduler": "ready", "metrics_registry": "ready"}
    assert states == dict.fromkeys(PATCHED, "present upstream") | rest
    again = [sys.executable, "-m", "polykv_vllm.seams", "--write-patches", "again"]
    done = subprocess.run(
        again, env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1 and not (tmp_path / "again").exists()
    assert "the seam kv_cache_dtype is present upstream in it" in done.stderr
    script = """
import typing, vllm
from polykv_vllm.seams import registry
for step in (lambda: None, registry.install, registry.require, registry.uninstall):
    step()
    print({row.seam.name: str(row.state) for row in registry.report()})
from vllm.config.cache import CacheDType, CacheConfig
print(vllm.__file__, CacheConfig(cache_dtype="polykv").cache_dtype)
print(typing.get_args(CacheDType))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before, with_plugin, _, after, module, names = done.stdout.splitlines()[-6:]
    assert module == f"{tmp_path}/vllm/__init__.py polykv"
    assert set(re.findall(r"polykv\w*", names)) == set(CACHE_DTYPES)
    assert before == after and before.count("'present upstream'") == len(PATCHED)
    assert with_plugin.count("'present upstream'") == len(PATCHED)
    assert with_plugin.count("'installed'") == len(rest)


def test_a_patch_for_an_unknown_seam_is_named() -> None:
    with pytest.raises(SeamError, match="patched for a seam 'teleport'"):
        polykv_seam("teleport")
