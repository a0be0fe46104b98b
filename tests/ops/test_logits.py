# SPDX-License-Identifier: Apache-2.0
"""Terms that make no sense are refused by name."""

import math
from typing import Any

import pytest
import torch

from polykv_vllm import ops
from tests.kernel_cases import ALL_ISAS, FORMAT_LIST, make_batch


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        ({"soft_cap": -1.0}, "soft cap must be positive and finite.*-1.0"),
        ({"soft_cap": math.inf}, "soft cap must be positive and finite.*inf"),
        ({"soft_cap": math.nan}, "soft cap must be positive and finite.*nan"),
        ({"sinks": torch.zeros(4).bfloat16()}, "sinks must be fp32.*bfloat16"),
        ({"sinks": torch.zeros(4, 1)}, r"sinks must be contiguous.*\[4, 1\]"),
        ({"alibi_slopes": torch.zeros(8)[::2]}, "alibi_slopes must be contiguous"),
        ({"alibi_slopes": torch.tensor([math.nan])}, "alibi_slopes must be finite"),
    ],
)
def test_refused(terms: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ops.LogitTerms(**terms)


@pytest.mark.parametrize("isa", ALL_ISAS)
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_of_another_number_of_heads(isa: str, name: str) -> None:
    terms = ops.LogitTerms(**{name: torch.zeros(3)})
    batch = make_batch(FORMAT_LIST[0], [(1, 5)], group=2, logits=terms)
    with pytest.raises(ValueError, match=f"3 {name} for 4 query heads"):
        batch.run(isa)


@pytest.mark.parametrize("isa", ALL_ISAS)
def test_sinks_are_read_at_every_call(isa: str) -> None:
    sinks = torch.zeros(4)
    terms = ops.LogitTerms(sinks=sinks)
    batch = make_batch(FORMAT_LIST[0], [(1, 5)], group=2, logits=terms)
    first = batch.run(isa)
    sinks.fill_(5.0)
    assert not torch.equal(batch.run(isa), first)
