# SPDX-License-Identifier: Apache-2.0
import sys
from typing import Any

import pytest
import torch

from polykv_vllm.seams import key_treatment


def loaders() -> set[type]:
    from vllm.model_executor import model_loader

    return set(model_loader._LOAD_FORMAT_TO_MODEL_LOADER.values())


@pytest.mark.usefixtures("installed")
def test_loaders_call_what_is_replaced() -> None:
    """A loader either ends with the seam or is one of those that are known not to."""
    from vllm.model_executor.model_loader import base_loader

    load_model = base_loader.BaseModelLoader.load_model
    while hasattr(load_model, "__wrapped__"):
        load_model = load_model.__wrapped__
    assert "process_weights_after_loading" in load_model.__code__.co_names
    assert load_model.__globals__ is vars(base_loader)
    own = {cls.__name__ for cls in loaders() if "load_model" in vars(cls)}
    assert own == {"IpcModelLoader", "ModelExpressModelLoader", "TensorizerLoader"}


@pytest.mark.parametrize("ours", [False, True])
def test_transforms_are_given_after_the_weights(
    monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """And only where an engine has layers of ours."""
    from polykv_vllm.attention import impl
    from polykv_vllm.attention import key_treatment as assignment

    calls: list[Any] = []
    monkeypatch.setattr(
        assignment, "assign_key_transforms", lambda *args: calls.append(args)
    )
    if not ours:
        monkeypatch.delitem(sys.modules, impl.__name__)
    replaced = key_treatment.SEAM.change.make(lambda *args: calls.append(args))
    model, config = torch.nn.Module(), type("Config", (), {"dtype": torch.bfloat16})
    replaced(model, config, torch.device("cpu"))
    expected = [(model, config, torch.device("cpu")), (model, torch.bfloat16)]
    assert calls == expected[: 1 + ours]
