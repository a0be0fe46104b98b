# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step belong to a request, and which models have a head."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polykv_vllm.evaluate.worker import WorkerError, _head_of, _Wanted

ONE_RANK = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
STATES = torch.arange(10.0)[:, None]  # the state of position p is p


@pytest.mark.parametrize("steps", [[10], [4, 6], [1, 1, 7, 1], [3, 3, 3, 1]])
def test_chunked_prefill_gives_the_same_rows(steps: list[int]) -> None:
    wanted = _Wanted("c0", tuple(range(10)), 5)
    position = 0
    for length in steps:
        wanted.take(position, STATES[position : position + length])
        position += length
    assert wanted.hidden()[:, 0].tolist() == [4, 5, 6, 7, 8]


def test_rows_do_not_change_with_the_engines_buffers() -> None:
    buffer = STATES.clone()
    wanted = _Wanted("c0", tuple(range(10)), 5)
    wanted.take(0, buffer)
    buffer.zero_()
    assert wanted.hidden()[:, 0].tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("first", [5, 6])
def test_positions_from_the_cache_cannot_be_scored(first: int) -> None:
    wanted = _Wanted("c0", tuple(range(10)), 5)
    wanted.take(first, STATES[first:])
    with pytest.raises(WorkerError, match=r"c0: position 4 .* prefix cache"):
        wanted.hidden()


def model(**members: Any) -> Any:
    processor = SimpleNamespace(org_vocab_size=6, scale=0.5, soft_cap=30.0)
    layer = SimpleNamespace(weight=torch.zeros(8, 4))
    defaults = {"logits_processor": processor, "lm_head": layer}
    return SimpleNamespace(**defaults | members)


def test_padding_is_cut_and_cap_and_scale_are_kept() -> None:
    head = _head_of(model(), ONE_RANK)
    assert head.weight.shape == (6, 4)
    assert (head.scale, head.soft_cap) == (0.5, 30.0)


def test_a_model_without_head_uses_its_embedding() -> None:
    layer = SimpleNamespace(weight=torch.ones(8, 4))
    tied = model(lm_head=None, model=SimpleNamespace(embed_tokens=layer))
    assert bool((_head_of(tied, ONE_RANK).weight == 1).all())


@pytest.mark.parametrize(
    "members",
    [
        {"logits_processor": None},
        {"lm_head": None},
        {"lm_head": SimpleNamespace(weight=torch.zeros(8, 4, dtype=torch.int8))},
        {"lm_head": SimpleNamespace(weight=torch.zeros(0, 4))},
    ],
)
def test_a_head_that_cannot_be_used_is_an_error(members: dict[str, Any]) -> None:
    with pytest.raises(WorkerError, match="lm_head"):
        _head_of(model(**members), ONE_RANK)


def test_a_model_in_parts_is_refused() -> None:
    ranks = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)
    with pytest.raises(WorkerError, match="size 1, not 2 and 1"):
        _head_of(model(), ranks)
