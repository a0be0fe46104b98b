# SPDX-License-Identifier: Apache-2.0
"""Seams are recognised in source files that nobody imports."""

import shutil
from pathlib import Path

import pytest

from polykv_vllm.seams import registry
from polykv_vllm.seams.fit import compare
from polykv_vllm.seams.seam import Seam
from polykv_vllm.seams.source import SourceTree
from tests.seams.patched_vllm import installed

# Of these seams, the files that one has to look at.
FILES = {
    "kv_cache_dtype": ("config/cache.py", "config/speculative.py"),
    "attention_backend": ("v1/attention/selector.py",),
    "layer_cache_dtype": ("model_executor/layers/attention/attention.py",),
    "key_treatment": (
        "model_executor/model_loader/base_loader.py",
        "model_executor/model_loader/utils.py",
    ),
    "scheduler": ("v1/core/sched/scheduler.py",),
    "prefix_pool": ("v1/engine/core.py",),
    "pool_requests": ("v1/core/sched/scheduler.py",),
    "pool_reset": ("v1/core/sched/scheduler.py",),
    "cache_salt": ("v1/core/kv_cache_utils.py",),
    "window_memory": ("v1/engine/core.py", "v1/core/kv_cache_utils.py"),
    "window_pages": ("v1/worker/gpu_model_runner.py",),
    "window_steps": ("v1/worker/gpu_model_runner.py",),
    "engine_config": ("engine/arg_utils.py",),
}
# A change of each seam's target: file, what is replaced, by what, what is reported.
CHANGES = [
    ("kv_cache_dtype", 0, '    "auto",\n', "", "not the expected Literal"),
    ("kv_cache_dtype", 0, "cache_dtype: CacheDType", "cache_dtype: str", "type str"),
    ("kv_cache_dtype", 1, "kv_cache_dtype: Cache", "other: Cache", "no field"),
    ("attention_backend", 0, "def _cached_get_attn", "def _choose", "not exist"),
    ("attention_backend", 0, "if not attention_cls", "if False", "found "),
    ("key_treatment", 1, "target_device: torch", "device: torch", "found "),
    ("scheduler", 0, "def _make_cached_request_data", "def _make_data", "not exist"),
    ("engine_config", 0, "headless: bool = False,\n    ) -> V", ") -> V", "found "),
]


def seam_of(name: str) -> Seam:
    return next(seam for seam in registry.SEAMS if seam.name == name)


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    for name in {name for names in FILES.values() for name in names}:
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(installed() / "vllm" / name, path)
    return SourceTree(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_the_source_has_the_fingerprint_of_the_module(
    tree: SourceTree, name: str
) -> None:
    assert seam_of(name).change.fingerprint_in(tree) in seam_of(name).expected


def test_every_seam_of_vllm_is_looked_at() -> None:
    ours = {s.name for s in registry.SEAMS if s.target.startswith("vllm.")}
    assert ours == FILES.keys()


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: f"{c[0]}: {c[3][:20]}")
def test_a_doctored_copy_is_found_out(
    tree: SourceTree, change: tuple[str, int, str, str, str]
) -> None:
    """The seam concerned, and no other."""
    name, index, old, new, expected = change
    path = tree.root / "vllm" / FILES[name][index]
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    found = {fit.seam.name: fit for fit in compare(registry.SEAMS, tree)}
    assert found[name].fits is False and expected in found[name].reason
    assert found["metrics_registry"].fits is None
    others = [fit.fits for n, fit in found.items() if n in FILES and n != name]
    assert others == [True] * (len(FILES) - 1)


def test_comments_and_layout_change_nothing(tree: SourceTree) -> None:
    path = tree.path("vllm.v1.attention.selector")
    text = path.read_text()
    assert "if not attention_cls:\n" in text
    path.write_text(
        text.replace("if not attention_cls:\n", "if not attention_cls:  # never\n\n")
    )
    assert all(fit.fits is not False for fit in compare(registry.SEAMS, tree))


def test_files_that_are_gone_are_named(tree: SourceTree) -> None:
    tree.path("vllm.v1.attention.selector").unlink()
    (gone,) = [fit for fit in compare(registry.SEAMS, tree) if fit.fits is False]
    assert "no module vllm.v1.attention.selector" in gone.reason
