# SPDX-License-Identifier: Apache-2.0
import torch

from polykv_vllm.pool.disk.weight_watch import WeightWatch


def model() -> torch.nn.Module:
    layers = [torch.nn.Linear(32, 48, dtype=torch.bfloat16) for _ in range(50)]
    return torch.nn.Sequential(*layers, torch.nn.LayerNorm(48))


def test_an_update_in_place_or_by_new_tensors_is_seen() -> None:
    watched = model()
    watch = WeightWatch([watched])
    assert not watch.has_changed()
    with torch.no_grad():
        for parameter in watched.parameters():
            parameter.mul_(1.25)
    assert watch.has_changed()
    watch = WeightWatch([watched])
    watched[0].weight = torch.nn.Parameter(torch.zeros(48, 32, dtype=torch.bfloat16))
    assert watch.has_changed()


def test_without_a_model_nothing_changes() -> None:
    assert not WeightWatch([]).has_changed()
