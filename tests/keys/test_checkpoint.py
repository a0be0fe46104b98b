# SPDX-License-Identifier: Apache-2.0
"""Key projections from a model's files."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="it writes the checkpoints")

from polykv_vllm.keys.checkpoint import UnreadableCheckpointError, read_checkpoint
from tests.random_models import FAMILIES, expected_projection, save_random_model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    model = save_random_model(tmp_path, family)
    found = read_checkpoint(tmp_path, model.config)
    assert len(found) == model.config.num_hidden_layers
    for layer, projection in enumerate(found):
        expected = expected_projection(model, layer)
        for part in ("key_bias", "key_spread", "query_bias", "query_spread"):
            torch.testing.assert_close(
                getattr(projection, part), getattr(expected, part)
            )
        assert projection.rotary == expected.rotary


def test_several_files(tmp_path: Path) -> None:
    model = save_random_model(tmp_path, "qwen2", key_bias=100.0)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        UnreadableCheckpointError, match=r"model\.safetensors is missing"
    ):
        read_checkpoint(tmp_path, model.config)
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = read_checkpoint(tmp_path, model.config)
    assert [round(float(p.key_bias.abs().max())) // 50 for p in found] == [2, 2, 2]


def test_quantized_weights_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = save_random_model(tmp_path, "llama")
    file, name = (
        tmp_path / "model.safetensors",
        "model.layers.1.self_attn.k_proj.weight",
    )
    weights = load_file(file)
    save_file(weights | {name: torch.zeros(2, 2, dtype=torch.int8)}, file)
    with pytest.raises(UnreadableCheckpointError, match=rf"{name} is torch.int8"):
        read_checkpoint(tmp_path, model.config)
    del weights[name]
    save_file(weights, file)
    with pytest.raises(UnreadableCheckpointError, match=rf"{name} is missing"):
        read_checkpoint(tmp_path, model.config)
