# SPDX-License-Identifier: Apache-2.0
"""What a layer is told by a calibration about its keys. Real models: tests/e2e."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polykv_vllm.calibrate.artifact import LayerCalibration
from polykv_vllm.calibrate.errors import CalibrationError

KV_HEADS, HEAD_SIZE = 2, 64
CALIBRATION: Any = SimpleNamespace(path=Path("/given"))


def layer_of(is_centred: bool) -> LayerCalibration:
    matrices = torch.randn(KV_HEADS, HEAD_SIZE, HEAD_SIZE, dtype=torch.float64)
    matrices = torch.linalg.qr(matrices).Q
    centers = torch.randn(KV_HEADS, HEAD_SIZE) if is_centred else None
    return LayerCalibration(matrices, matrices.mT, matrices, matrices.mT, centers)


def make_impl(**options: Any) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config

    from polykv_vllm.attention.impl import PolyKVImpl

    config = VllmConfig(additional_config={"polykv": {"isa": "scalar"}})
    more = {"kv_cache_dtype": "polykv_k2v2"} | options
    with set_current_vllm_config(config):
        return PolyKVImpl(2 * KV_HEADS, HEAD_SIZE, 0.125, KV_HEADS, **more)


def test_keys_go_through_what_was_calibrated() -> None:
    from polykv_vllm.attention.calibration import give_keys
    from polykv_vllm.attention.key_treatment import assign_key_transforms

    impl, layer = make_impl(), layer_of(is_centred=True)
    give_keys("layers.0", impl, layer, CALIBRATION)
    model = torch.nn.Module()
    model.attn = torch.nn.Module()
    model.attn.impl = impl
    assign_key_transforms(model, torch.float32)
    key = torch.randn(5, KV_HEADS, HEAD_SIZE)
    assert layer.key_center is not None
    centred = key.double() - layer.key_center
    expected = torch.einsum("thi,hji->thj", centred, layer.key).float()
    torch.testing.assert_close(impl.key_transform.keys(key), expected)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"logits_soft_cap": 50.0}, "a soft cap"),
        ({"sinks": torch.zeros(2 * KV_HEADS)}, "sinks"),
    ],
)
def test_layers_that_need_their_logits_refuse_centred_keys(
    options: dict[str, Any], name: str
) -> None:
    from polykv_vllm.attention.calibration import give_keys

    impl = make_impl(**options)
    words = f"/given: layers.7: centred keys .* {name} of the layer .*--no-center-keys"
    with pytest.raises(CalibrationError, match=words):
        give_keys("layers.7", impl, layer_of(is_centred=True), CALIBRATION)
    assert impl.calibrated_keys is None
    give_keys("layers.7", impl, layer_of(is_centred=False), CALIBRATION)
    assert impl.calibrated_keys.centers is None
