# SPDX-License-Identifier: Apache-2.0
"""Every recipe is pinned completely."""

import re

import pytest

from polykv_vllm.models import DEFAULT_MODEL, MODELS, ModelRecipe


@pytest.mark.parametrize("recipe", MODELS.values(), ids=MODELS)
def test_pins(recipe: ModelRecipe) -> None:
    assert re.fullmatch("[0-9a-f]{64}", recipe.sha256)
    assert all(re.fullmatch(r"[\w.-]+==[\d.]+", p) for p in recipe.packages)
    assert len(set(recipe.packages)) == len(recipe.packages)


def test_default_exists() -> None:
    assert MODELS[DEFAULT_MODEL].name == DEFAULT_MODEL
