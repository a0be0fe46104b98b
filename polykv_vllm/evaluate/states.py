# SPDX-License-Identifier: Apache-2.0
"""The reference's last hidden states on disk, one file for each request."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from polykv_vllm.evaluate.errors import EngineError

_HIDDEN, _TOKENS = "hidden", "tokens"


class StatesError(EngineError):
    """There are no states for a request, or they belong to other tokens."""


def save_states(
    folder: Path, key: str, tokens: Sequence[int], begin: int, hidden: Tensor
) -> None:
    """Keep the states that predict `tokens[begin:]`.

    Args:
        folder: Of the run.
        key: Of the request, also the file's name.
        tokens: Of the whole request.
        begin: First predicted position.
        hidden: `[len(tokens) - begin, hidden_size]` in the model's dtype.

    """
    from safetensors.torch import save_file

    path = _path(folder, key)
    temporary = path.with_suffix(".tmp")
    metadata = {_TOKENS: _digest(tokens, begin)}
    save_file({_HIDDEN: hidden.contiguous()}, temporary, metadata)
    temporary.replace(path)


def load_states(folder: Path, key: str, tokens: Sequence[int], begin: int) -> Tensor:
    """Return what `save_states` kept for the same request.

    Raises:
        StatesError: Nothing was kept, or for other tokens.

    """
    from safetensors import safe_open

    path = _path(folder, key)
    if not path.exists():
        raise StatesError(
            f"the reference has no hidden states for {key} ({path} is missing): it "
            "must have scored the same request"
        )
    with safe_open(path, framework="pt") as file:
        if file.metadata()[_TOKENS] != _digest(tokens, begin):
            raise StatesError(f"{path} belongs to other tokens than those of {key}")
        hidden = file.get_tensor(_HIDDEN)
    assert isinstance(hidden, torch.Tensor)
    return hidden


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.safetensors"


def _digest(tokens: Sequence[int], begin: int) -> str:
    return hashlib.sha256(f"{begin}:{list(tokens)}".encode()).hexdigest()
