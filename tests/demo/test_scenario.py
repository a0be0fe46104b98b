# SPDX-License-Identifier: Apache-2.0
"""The scenario is what the demo promises."""

import pytest

from polykv_vllm.demo.run import NUM_WAVES
from polykv_vllm.demo.scenario import load_scenario
from polykv_vllm.models import DEFAULT_MODEL, build_model


def test_eight_agents_with_a_turn_for_each_wave() -> None:
    agents = load_scenario().agents
    assert len({agent.name for agent in agents}) == 8
    assert all(len(agent.turns) == NUM_WAVES for agent in agents)


@pytest.mark.e2e
def test_system_prompt_has_a_thousand_tokens() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(build_model(DEFAULT_MODEL))
    assert len(tokenizer.encode(load_scenario().system_prompt)) >= 1000
