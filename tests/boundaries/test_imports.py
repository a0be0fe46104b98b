# SPDX-License-Identifier: Apache-2.0
"""Dependencies point downward: checked in fresh processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import polykv_vllm

PACKAGE = Path(polykv_vllm.__file__).parent


def loaded_by(module: str) -> set[str]:
    """Import `module` in a new process; return every module then loaded."""
    code = (
        f"import sys, json, {module}; "
        "print(json.dumps(sorted(sys.modules)), file=sys.stdout)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(json.loads(result.stdout.splitlines()[-1]))


def modules_below(*layers: str) -> list[str]:
    """Return the dotted names of every module in the layers that exist."""
    return [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        for layer in layers
        for path in sorted((PACKAGE / layer).rglob("*.py"))
    ]


def test_the_package_is_light() -> None:
    """`import polykv_vllm` costs no torch, no vllm and none of its own layers."""
    loaded = loaded_by("polykv_vllm")
    assert not {"torch", "vllm", "numpy", "pydantic", "typer"} & loaded
    assert {m for m in loaded if m.startswith("polykv_vllm.")} == set()


@pytest.mark.parametrize("module", modules_below("formats"))
def test_formats_are_pure_python(module: str) -> None:
    loaded = loaded_by(module)
    assert not {"torch", "vllm", "numpy"} & loaded
    ours = {m.split(".")[1] for m in loaded if m.startswith("polykv_vllm.")}
    assert ours == {"formats"}


@pytest.mark.parametrize("module", ["leader", "duplicates"])
def test_the_policy_of_the_pool_is_pure_python(module: str) -> None:
    loaded = loaded_by(f"polykv_vllm.pool.{module}")
    assert not {"torch", "vllm", "numpy"} & loaded
    ours = {m.split(".")[1] for m in loaded if m.startswith("polykv_vllm.")}
    assert ours == {"pool"}


PURE_DISK = ["fields", "identity", "content", "blockfile", "directory", "store"]
PURE_POOL = [*(f"disk.{name}" for name in [*PURE_DISK, "writer", "weights"]), "pins"]


@pytest.mark.parametrize("module", [*PURE_POOL, "options", "http.spec"])
def test_what_the_pool_keeps_can_be_looked_at_without_an_engine(module: str) -> None:
    loaded = loaded_by(f"polykv_vllm.pool.{module}")
    assert not {"torch", "vllm", "numpy"} & loaded
    ours = {m.split(".")[1] for m in loaded if m.startswith("polykv_vllm.")}
    assert ours <= {"pool", "errors"}


LOWER = modules_below("reference", "keys", "ops", "kernels")


def test_lower_layers_know_no_vllm() -> None:
    """A GPU machine without vLLM must be able to check and time the kernels."""
    loaded = loaded_by(", ".join(LOWER))
    assert "torch" in loaded  # else this test would look at nothing
    assert "vllm" not in loaded
    ours = {m.split(".")[1] for m in loaded if m.startswith("polykv_vllm.")}
    assert ours <= {"formats", "reference", "keys", "ops", "kernels"}


def test_the_reference_knows_no_kernel() -> None:
    loaded = loaded_by(", ".join(modules_below("reference")))
    ours = {m.split(".")[1] for m in loaded if m.startswith("polykv_vllm.")}
    assert ours == {"formats", "reference"}


def test_transformers_layers_know_no_vllm() -> None:
    """The second implementation must run, and be believed, without the first."""
    loaded = loaded_by(", ".join(modules_below("hf")))
    assert "transformers" in loaded
    assert "vllm" not in loaded
    ours = {m.split(".")[1] for m in loaded if m.startswith("polykv_vllm.")}
    lower = {"formats", "reference", "keys", "ops", "errors"}
    assert ours <= {"hf", "support", "architectures", *lower}


def test_what_is_served_is_said_without_torch() -> None:
    loaded = loaded_by("polykv_vllm.support")
    assert not {"torch", "vllm", "transformers"} & loaded
    ours = {m.split(".")[1] for m in loaded if m.startswith("polykv_vllm.")}
    assert ours == {"formats", "support", "architectures"}


def test_keys_know_neither_vllm_nor_transformers() -> None:
    loaded = loaded_by(", ".join(modules_below("keys")))
    assert not {"vllm", "transformers"} & loaded
    ours = {m.split(".")[1] for m in loaded if m.startswith("polykv_vllm.")}
    assert ours == {"formats", "reference", "keys"}


ARTIFACT = ("artifact", "fold", "build", "statistics", "transforms")


def test_calibration_knows_no_vllm() -> None:
    """What an engine needs of it takes no transformers and no evaluation either."""
    loaded = loaded_by(", ".join(f"polykv_vllm.calibrate.{name}" for name in ARTIFACT))
    assert not {"vllm", "transformers"} & loaded
    ours = {m.split(".")[1] for m in loaded if m.startswith("polykv_vllm.")}
    assert ours == {
        "calibrate",
        "formats",
        "keys",
        "reference",
        "reporting",
        "errors",
    }
    loaded = loaded_by(", ".join(modules_below("calibrate")))
    assert "transformers" in loaded
    assert "vllm" not in loaded


def test_only_the_facing_layers_name_vllm() -> None:
    """In the sources too, where a late import would escape the tests above."""
    facing = ("attention", "seams", "pool", "plugin.py")
    lower = ("formats", "reference", "keys", "ops", "kernels", "metrics", "hf")
    lower += ("calibrate",)
    found = [
        str(path.relative_to(PACKAGE))
        for layer in lower
        for path in (PACKAGE / layer).rglob("*.py")
        for line in path.read_text().splitlines()
        if line.strip().startswith(("import vllm", "from vllm"))
    ]
    assert found == [], f"only {', '.join(facing)} may import vllm"


@pytest.mark.parametrize("module", modules_below("metrics"))
def test_metrics_know_neither_torch_nor_vllm(module: str) -> None:
    """Only the front end's side needs the Prometheus client."""
    loaded = loaded_by(module)
    assert not {"torch", "vllm", "numpy"} & loaded
    ours = {m.split(".")[1] for m in loaded if m.startswith("polykv_vllm.")}
    assert ours <= {"metrics", "envs"}
    is_front_end = module.endswith((".collector", ".serving"))
    assert ("prometheus_client" in loaded) == is_front_end
