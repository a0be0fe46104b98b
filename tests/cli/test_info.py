# SPDX-License-Identifier: Apache-2.0
"""`polykv info`: the formats' figures, and life without vLLM."""

import pytest
from rich.console import Console

from polykv_vllm.cli import info
from polykv_vllm.cli.info import SHOWN_HEAD_DIMS
from polykv_vllm.formats import FORMATS


def _printed(width: int = 100) -> str:
    console = Console(width=width, record=True)
    info.print_info(console)
    return console.export_text()


def test_shows_bytes_and_ratio_of_every_format() -> None:
    rows = [line.split("│") for line in _printed().splitlines() if "│" in line]
    cells = {row[1].strip(): [cell.split() for cell in row[4:7]] for row in rows}
    for name, spec in FORMATS.items():
        assert cells[name] == [
            [str(spec.slot_bytes(d)), f"{spec.compression_ratio(d):.2f}x"]
            for d in SHOWN_HEAD_DIMS
        ]


def test_names_the_kernels_and_the_seams() -> None:
    from polykv_vllm import ops
    from polykv_vllm.seams import registry

    text = _printed(width=200)
    assert f"{ops.current_isa()} in use" in text
    for row in registry.report():
        assert row.seam.name in text


def test_a_forced_set_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    from polykv_vllm import ops

    monkeypatch.setenv("POLYKV_CPU_ISA", "mmx")
    ops.current_isa.cache_clear()
    text = _printed(width=200)
    ops.current_isa.cache_clear()
    assert "not usable: POLYKV_CPU_ISA=mmx: this build has no such kernels" in text


def test_names_the_key_treatments() -> None:
    from polykv_vllm.keys import TREATMENTS

    text = _printed(width=200)
    assert f"key_treatment  auto, {', '.join(TREATMENTS)} (the default: auto)" in text


def test_fits_a_narrow_terminal() -> None:
    text = _printed(width=80)
    assert "…" not in text
    assert all(name in text for name in FORMATS)


def test_works_without_vllm_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "find_spec", lambda module: None)
    text = _printed()
    assert "vLLM           not installed" in text
    assert "polykv_k8v3" in text
    assert "Seams" not in text
