# SPDX-License-Identifier: Apache-2.0
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from polykv_vllm.seams import probe
from polykv_vllm.seams.seam import Wrap

SOURCE = """
class Thing:
    @classmethod
    def answer(cls, question, times=1):
        # a comment
        return [cls.__name__] * times

    def plain(self):
        return 1
"""

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import a source text as the module `probed`."""

    def load(source: str) -> ModuleType:
        path = tmp_path / f"probed{len(list(tmp_path.iterdir()))}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("probed", path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "probed", module)
        spec.loader.exec_module(module)
        return module

    return load


def answer_print(module: ModuleType) -> str:
    return probe.fingerprint(vars(module.Thing)["answer"])


def test_fingerprint_ignores_comments_and_layout(load: Load) -> None:
    first = answer_print(load(SOURCE))
    relaid = SOURCE.replace("# a comment", "# another").replace(
        "(cls, ", "(\n        cls,"
    )
    assert answer_print(load(relaid)) == first


@pytest.mark.parametrize("change", [("times=1", "times=2"), ("* times", "+ times")])
def test_fingerprint_sees_code_and_signature(
    load: Load, change: tuple[str, str]
) -> None:
    first = answer_print(load(SOURCE))
    assert answer_print(load(SOURCE.replace(*change))) != first


def test_missing_targets_are_named(load: Load) -> None:
    load(SOURCE)
    with pytest.raises(AttributeError, match=r"probed:Thing\.gone does not exist"):
        probe.resolve("probed:Thing.gone")
    with pytest.raises(ModuleNotFoundError):
        probe.resolve("no_such_module:name")


@pytest.mark.parametrize("name", ["answer", "plain"])
def test_wrap_keeps_the_kind_and_restores(load: Load, name: str) -> None:
    module = load(SOURCE)
    before = vars(module.Thing)[name]

    def make(original: Callable[..., object]) -> Callable[..., object]:
        return lambda *args, **kwargs: ["wrapped", original(*args, **kwargs)]

    wrap = Wrap("test", f"probed:Thing.{name}", make)
    found = wrap.fingerprint()
    for _ in range(2):
        wrap.install()
        assert wrap.is_installed()
        assert wrap.fingerprint() == found
    arguments = ["why"] if name == "answer" else []
    assert getattr(module.Thing(), name)(*arguments)[0] == "wrapped"
    assert type(vars(module.Thing)[name]) is type(before)
    wrap.uninstall()
    assert not wrap.is_installed()
    assert getattr(module.Thing(), name)(*arguments) in (["Thing"], 1)


def test_signature_comparison() -> None:
    def function(first: int, second: str = "x", *, third: bool = False) -> None: ...

    assert probe.signature(function) == "(first, second='x', *, third=False)"
