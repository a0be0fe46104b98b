# SPDX-License-Identifier: Apache-2.0
"""The codecs of the study against known errors, and the study itself, once."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import _codecs as codecs
from benchmarks._codec_variants import SETS
from benchmarks._codecs import Gaussian
from polykv_vllm.formats import FORMATS


def error(codec: codecs.Codec, rows: torch.Tensor) -> float:
    """Mean squared error relative to the rows."""
    return float((codec(rows) - rows).square().sum() / rows.square().sum())


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return torch.randn(4000, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        # Max 1960 for N(0, 1); a row's own scale shifts it by about 1/128.
        (Gaussian(3), 0.0345),
        (Gaussian(4), 0.0095),
        (Gaussian(5), 0.0025),
        (Gaussian(3, uniform=True), 0.0374),
        (Gaussian(4, uniform=True), 0.0115),
        (Gaussian(3, rotated=False), 0.0345),
        (Gaussian(3, "tensor"), 0.0345),
    ],
)
def test_errors_on_gaussian_rows(
    codec: Gaussian, expected: float, rows: torch.Tensor
) -> None:
    assert error(codec, rows) == pytest.approx(expected, rel=0.04)


def test_least_squares_is_least(rows: torch.Tensor) -> None:
    found = {s: error(Gaussian(3, s), rows) for s in ("rms", "norm", "unbiased")}
    assert error(Gaussian(3, "least_squares"), rows) < min(found.values())


def test_one_scale_fails_where_rows_differ(rows: torch.Tensor) -> None:
    mixed = rows * torch.logspace(-2, 0, len(rows))[:, None]
    assert error(Gaussian(3), mixed) == pytest.approx(0.0345, rel=0.04)
    small = mixed[: len(rows) // 2]
    out = Gaussian(3, "tensor")(mixed)[: len(small)]
    assert float((out - small).square().sum() / small.square().sum()) > 0.5


def test_ours_are_the_formats(rows: torch.Tensor) -> None:
    """The same codec written twice: the study's and the reference's."""
    ours = codecs.our_value(FORMATS["polykv_k8v3"])(rows)
    torch.testing.assert_close(Gaussian(3)(rows), ours, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize(
    ("codec", "bound"),
    [
        (codecs.symmetric(8), 2e-4),
        (codecs.affine(4), 0.02),
        (codecs.int4_per_token_head, 0.02),
        (codecs.fp8, 1e-3),
    ],
)
def test_the_others_stay_close(
    codec: codecs.Codec, bound: float, rows: torch.Tensor
) -> None:
    assert 0 < error(codec, rows) < bound


def test_names_are_distinct() -> None:
    names = [variant.name for each in SETS.values() for variant in each]
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_the_study_runs(tmp_path: Path) -> None:
    from benchmarks.codec import main

    text = tmp_path / "text.txt"
    text.write_text("The cache keeps keys and values of every token. " * 40)
    app = typer.Typer()
    app.command()(main)
    arguments = ["smollm2-135m-instruct", "--set", "published", "--text", str(text)]
    arguments += ["--chunk-tokens", "96", "--max-chunks", "2"]
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, [*arguments, "--json", str(out)])
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert len(record["value_rms"]) == 30
    klds = {name: v["kld"]["value"] for name, v in record["variants"].items()}
    k8v3, k8v8, per_tensor = klds.values()
    assert k8v8 < k8v3 < per_tensor


def test_an_unknown_set_is_named() -> None:
    from benchmarks.codec import main

    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["some-model", "--set", "keyz"])
    assert result.exit_code == 2
    assert "keyz" in result.output and "bytes" in result.output
