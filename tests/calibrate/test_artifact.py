# SPDX-License-Identifier: Apache-2.0
"""A calibration is used as it was made, or refused by file, layer and head."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polykv_vllm.calibrate.artifact import (
    RECORD_FILE,
    TENSOR_FILE,
    load_calibration,
)
from polykv_vllm.calibrate.errors import CalibrationError
from polykv_vllm.calibrate.weights import head_digests
from tests.calibrate.models import calibrate_random
from tests.hf.models import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    calibrate_random(tiny_model("llama"), tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    record = json.loads((folder / RECORD_FILE).read_text())
    change(record)
    (folder / RECORD_FILE).write_text(json.dumps(record))


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        load_calibration(folder)
    for word in words:
        assert word in str(caught.value)


def test_what_was_made_is_read(folder: Path) -> None:
    found = load_calibration(folder)
    record = found.record
    assert (record.transform, record.damping, record.hadamard_blocks) == (
        "wush",
        0.01,
        [64],
    )
    assert len(record.weights) == 3 and len(record.weights[0]) == 2
    assert record.model.head_dim == 64 and record.model.rope
    assert found.digest == record.tensors and len(found.digest) == 64
    assert {"torch", "transformers", "polykv-vllm"} <= set(record.versions)
    layer = found.layer(1)
    eye = torch.eye(64, dtype=torch.float64).expand(2, 64, 64)
    torch.testing.assert_close(layer.key @ layer.key_inverse, eye)
    torch.testing.assert_close(layer.value @ layer.value_inverse, eye)
    own = found.layer(1, heads=[1])
    assert torch.equal(own.value, layer.value[1:])
    assert record.center_keys and own.key_center is not None
    assert torch.equal(own.key_center, found.key_center[1, 1:])
    assert bool((found.key_center != 0).any(-1).all())


def test_keys_need_not_be_centred(folder: Path) -> None:
    model = tiny_model("llama")
    calibrate_random(model, folder / "plain", center_keys=False)
    plain, centred = load_calibration(folder / "plain"), load_calibration(folder)
    assert plain.layer(1).key_center is None and not plain.record.center_keys
    assert not torch.equal(plain.key, centred.key)
    assert torch.equal(plain.value, centred.value)


def test_the_same_text_gives_the_same_calibration(folder: Path) -> None:
    again = calibrate_random(tiny_model("llama"), folder / "again")
    assert again.tensors == load_calibration(folder).digest


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nothing", RECORD_FILE, "polykv calibrate")
    (folder / TENSOR_FILE).unlink()
    refused(folder, TENSOR_FILE)


def test_torn_and_exchanged_files_are_refused(folder: Path) -> None:
    path = folder / TENSOR_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(folder, TENSOR_FILE)
    tensors = load_file_of(whole, folder)
    tensors["key_transform"][0, 0] *= 2
    save_file(tensors, path)
    refused(folder, TENSOR_FILE, "digest")
    (folder / RECORD_FILE).write_text("{")
    refused(folder, RECORD_FILE, "no JSON")


def load_file_of(whole: bytes, folder: Path) -> dict[str, torch.Tensor]:
    (folder / TENSOR_FILE).write_bytes(whole)
    return load_file(folder / TENSOR_FILE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(format_version=1), ["format version 1", "calibrate again"]),
        (lambda r: r.pop("damping"), ["damping"]),
        (lambda r: r.update(extra=1), ["extra"]),
        (lambda r: r["weights"].pop(), ["[2, 2]", "[3, 2]"]),
        (lambda r: r["model"].update(head_dim=128), ["key_transform", "128"]),
        (lambda r: r["model"].update(num_layers="x"), ["model.num_layers"]),
    ],
)
def test_a_record_that_does_not_fit_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], None], words: list[str]
) -> None:
    rewrite(folder, change)
    refused(folder, *words)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0.0, "is all zeros"),
        (torch.nan, "not finite"),
        (torch.inf, "not finite"),
        (1.0, "has no inverse"),
    ],
)
@pytest.mark.parametrize("name", ["key_transform", "value_transform"])
def test_numbers_that_are_no_transform_are_named(
    folder: Path, name: str, number: float, words: str
) -> None:
    """Case 9: file, layer and head are named, and nothing is loaded."""
    tensors = load_file(folder / TENSOR_FILE)
    tensors[name][2, 1] = number
    save_file(tensors, folder / TENSOR_FILE)
    refused(folder, TENSOR_FILE, name, "layer 2, KV head 1", words)


def test_a_missing_layer_is_refused(folder: Path) -> None:
    """Case 9: one layer absent, or all of them."""
    tensors = load_file(folder / TENSOR_FILE)
    for name, size in (("value_transform", "64, 64"), ("key_center", "64")):
        short = tensors | {name: tensors[name][:2].contiguous()}
        save_file(short, folder / TENSOR_FILE)
        refused(folder, name, f"[2, 2, {size}]", f"[3, 2, {size}]")
    del tensors["key_transform"]
    save_file(tensors, folder / TENSOR_FILE)
    refused(folder, "holds key_center, value_transform")


def test_a_center_that_is_none_is_named(folder: Path) -> None:
    tensors = load_file(folder / TENSOR_FILE)
    tensors["key_center"][2, 1, 5] = torch.nan
    save_file(tensors, folder / TENSOR_FILE)
    refused(folder, "key_center", "layer 2, KV head 1", "not finite")


def test_digests_know_heads_and_not_dtypes() -> None:
    weight = torch.randn(128, 32).bfloat16() * torch.logspace(-7, 0, 32).bfloat16()
    bias = torch.randn(128).bfloat16()

    def digests(dtype: torch.dtype, bias: torch.Tensor | None) -> list[str]:
        own = None if bias is None else bias.to(dtype)
        return head_digests((weight.to(dtype), own), (weight.to(dtype), None), 64)

    expected = digests(torch.bfloat16, bias)
    assert len(set(expected)) == 2
    for dtype in (torch.float16, torch.float32):
        assert digests(dtype, bias) == expected
    assert digests(torch.bfloat16, None) == digests(torch.bfloat16, bias * 0)
    assert digests(torch.bfloat16, None)[0] != expected[0]
    weight[70, 3] += 1
    changed = digests(torch.bfloat16, bias)
    assert [a == b for a, b in zip(changed, expected, strict=True)] == [True, False]
