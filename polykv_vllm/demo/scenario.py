# SPDX-License-Identifier: Apache-2.0
"""The demo's conversations: agents of one support desk behind one handbook."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files

Message = dict[str, str]
"""One chat message as the OpenAI API takes it: `role` and `content`."""


@dataclass(frozen=True)
class AgentScript:
    """What the customer of one agent says, a message for each wave."""

    name: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Scenario:
    """Agents that share one system prompt."""

    system_prompt: str
    agents: tuple[AgentScript, ...]


def load_scenario() -> Scenario:
    """Read the scenario that ships with the package."""
    data = files("polykv_vllm.demo") / "data"
    agents = tomllib.loads((data / "agents.toml").read_text())["agents"]
    return Scenario(
        system_prompt=(data / "handbook.md").read_text(),
        agents=tuple(AgentScript(a["name"], tuple(a["turns"])) for a in agents),
    )
