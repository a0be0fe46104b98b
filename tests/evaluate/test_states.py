# SPDX-License-Identifier: Apache-2.0
"""Hidden states on disk belong to one request."""

from pathlib import Path

import pytest
import torch

from polykv_vllm.evaluate.states import StatesError, load_states, save_states


def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    hidden = torch.randn(3, 8).bfloat16()
    save_states(tmp_path, "c0", (1, 2, 3, 4, 5), 2, hidden)
    assert torch.equal(load_states(tmp_path, "c0", (1, 2, 3, 4, 5), 2), hidden)
    assert [path.name for path in tmp_path.iterdir()] == ["c0.safetensors"]


def test_states_of_other_tokens_are_refused(tmp_path: Path) -> None:
    save_states(tmp_path, "c0", (1, 2, 3), 1, torch.zeros(2, 8))
    for tokens, begin in (((1, 2, 4), 1), ((1, 2, 3), 2)):
        with pytest.raises(StatesError, match="other tokens"):
            load_states(tmp_path, "c0", tokens, begin)
    with pytest.raises(StatesError, match=r"no hidden states for c1.*must have scored"):
        load_states(tmp_path, "c1", (1, 2, 3), 1)
