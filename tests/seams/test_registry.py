# SPDX-License-Identifier: Apache-2.0
import dataclasses
from types import SimpleNamespace

import pytest

from polykv_vllm import plugin
from polykv_vllm.errors import SeamError
from polykv_vllm.seams import registry
from polykv_vllm.seams.seam import Seam, SeamState


def states() -> dict[str, SeamState]:
    return {row.seam.name: row.state for row in registry.report()}


def changed_seam(seam: Seam) -> Seam:
    return dataclasses.replace(seam, expected=("another target",))


@pytest.mark.usefixtures("removed")
def test_each_target_is_the_expected_one() -> None:
    assert {row.reason for row in registry.report()} == {""}
    assert set(states().values()) == {SeamState.READY}


@pytest.mark.usefixtures("removed")
def test_install_and_uninstall_can_be_repeated() -> None:
    for _ in range(2):
        plugin.register()
        assert set(states().values()) == {SeamState.INSTALLED}
    for _ in range(2):
        registry.uninstall()
        assert set(states().values()) == {SeamState.READY}


@pytest.mark.usefixtures("removed")
@pytest.mark.parametrize("index", range(len(registry.SEAMS)))
def test_a_changed_target_fails_only_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    seams = list(registry.SEAMS)
    name = seams[index].name
    seams[index] = changed_seam(seams[index])
    monkeypatch.setattr(registry, "SEAMS", tuple(seams))
    plugin.register()
    with pytest.raises(SeamError, match=f"{name} .*expected another target"):
        registry.require()
    if seams[index].name != registry.GUARD.name:
        with pytest.raises(SeamError, match=name):
            EngineArgs(
                model="never-read", kv_cache_dtype="polykv"
            ).create_engine_config()
    installed = [n for n, s in states().items() if s is SeamState.INSTALLED]
    assert installed in ([], [registry.GUARD.name])


@pytest.mark.usefixtures("removed")
@pytest.mark.parametrize("version", ["0.31.2", "0.33.0.dev3", "dev", None])
def test_another_vllm_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    monkeypatch.setattr(registry, "vllm_version", lambda: version)
    plugin.register()
    with pytest.raises(SeamError, match=rf">=0.32,<0.33; installed: {version}"):
        registry.require()


@pytest.mark.usefixtures("removed")
@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.1.dev7+g0123abc"])
def test_builds_of_the_release_are_taken(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(registry, "vllm_version", lambda: version)
    plugin.register()
    registry.require()


@pytest.mark.usefixtures("removed")
@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        (["vllm", "serve", "m", "--kv-cache-dtype", "polykv"], True),
        (["vllm", "serve", "m", "--kv_cache_dtype=polykv_k7v4"], True),
        (["vllm", "serve", "polykv", "--kv-cache-dtype", "fp8"], False),
        (["vllm", "serve", "m", "--served-model-name", "polykv"], False),
    ],
)
def test_the_command_line_is_refused_when_it_asks(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], asked: bool
) -> None:
    monkeypatch.setattr(registry, "vllm_version", lambda: "0.33.0")
    monkeypatch.setattr("sys.argv", argv)
    if asked:
        with pytest.raises(SeamError, match=r"installed: 0\.33\.0"):
            plugin.register()
    else:
        plugin.register()


@pytest.mark.usefixtures("removed")
def test_a_failing_installation_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def install() -> None:
        raise RuntimeError("disk on fire")

    real = registry.SEAMS[1].change
    failing = SimpleNamespace(
        fingerprint=real.fingerprint,
        is_installed=real.is_installed,
        is_present=real.is_present,
        uninstall=real.uninstall,
        install=install,
    )
    seams = list(registry.SEAMS)
    broken = dataclasses.replace(seams[1], change=failing)
    monkeypatch.setattr(registry, "SEAMS", (seams[0], broken, *seams[2:]))
    plugin.register()
    with pytest.raises(SeamError, match=r"attention_backend.*disk on fire"):
        registry.require()
    assert states()["kv_cache_dtype"] is SeamState.READY


@pytest.mark.compat
@pytest.mark.parametrize("seam", registry.SEAMS, ids=lambda seam: seam.name)
def test_the_seam_is_still_needed(seam: Seam) -> None:
    assert not seam.is_obsolete(), f"delete {seam.name}: {seam.remove_when}"


def test_records_are_complete() -> None:
    names = [seam.name for seam in registry.SEAMS]
    assert len(set(names)) == len(names)
    for seam in registry.SEAMS:
        for text in (seam.target, seam.why, seam.upstream, seam.remove_when):
            assert text
        assert all(seam.expected)


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from polykv_vllm.seams.__main__ import main

    assert main() == 0
    printed = capsys.readouterr().out
    for seam in registry.SEAMS:
        assert f"\n{seam.name}: " in printed
        assert seam.why in printed
