# SPDX-License-Identifier: Apache-2.0
"""Runs the agents' requests through the ordinary OpenAI client."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from polykv_vllm.demo.scenario import AgentScript, Message, Scenario

if TYPE_CHECKING:
    from openai import AsyncOpenAI

REQUEST_TIMEOUT_S = 180.0


@dataclass
class Turn:
    """One request and its answer.

    Attributes:
        agent: Name of the agent.
        question: What the customer says.
        answer: The answer so far; grows while it streams.
        prompt_tokens: Counted by the server; 0 until the answer is complete.
        output_tokens: Likewise.
        first_token_s: Seconds from the request to the first text; None before it.
        done: The answer is complete.

    """

    agent: str
    question: str
    answer: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float | None = None
    done: bool = False


@dataclass
class Wave:
    """One turn of every agent, sent at the same time."""

    turns: list[Turn]
    wall_s: float = 0.0

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, those found in the prefix cache included."""
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def first_token_s(self) -> float:
        """Median seconds until an agent sees the first text of its answer."""
        return median(turn.first_token_s or self.wall_s for turn in self.turns)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all agents together per second, prefill included."""
        return self.output_tokens / self.wall_s if self.wall_s else 0.0


@dataclass
class Agent:
    """A conversation: the shared system prompt, then the agent's own messages."""

    script: AgentScript
    messages: list[Message] = field(default_factory=list)


def open_conversations(scenario: Scenario) -> list[Agent]:
    """Return one conversation for each agent, all with the same first message."""
    system = {"role": "system", "content": scenario.system_prompt}
    return [Agent(script, [system]) for script in scenario.agents]


def next_wave(agents: Sequence[Agent], number: int) -> Wave:
    """Return turn `number` (from 0) of every agent, not yet sent."""
    return Wave([Turn(a.script.name, a.script.turns[number]) for a in agents])


def run_wave(
    wave: Wave,
    agents: Sequence[Agent],
    base_url: str,
    model: str,
    max_tokens: int,
) -> None:
    """Send all requests of `wave` at once and stream the answers into it.

    The answers are also appended to the conversations.

    Args:
        wave: From `next_wave`; filled in as the answers arrive.
        agents: The conversations, in the order of the wave's turns.
        base_url: The server's address, without `/v1`.
        model: The served model's name.
        max_tokens: Longest answer.

    """

    async def run() -> None:
        from openai import AsyncOpenAI

        # The key is not checked: the client merely insists on having one.
        client = AsyncOpenAI(
            base_url=f"{base_url}/v1",
            api_key="unused",
            timeout=REQUEST_TIMEOUT_S,
            max_retries=0,
        )
        async with client, asyncio.TaskGroup() as group:
            for agent, turn in zip(agents, wave.turns, strict=True):
                group.create_task(_converse(client, model, agent, turn, max_tokens))

    started = time.perf_counter()
    asyncio.run(run())
    wave.wall_s = time.perf_counter() - started


async def _converse(
    client: "AsyncOpenAI", model: str, agent: Agent, turn: Turn, max_tokens: int
) -> None:
    agent.messages.append({"role": "user", "content": turn.question})
    started = time.perf_counter()
    stream = await client.chat.completions.create(
        model=model,
        messages=agent.messages,
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if chunk.usage is not None:
            turn.prompt_tokens = chunk.usage.prompt_tokens
            turn.output_tokens = chunk.usage.completion_tokens
        if chunk.choices and (text := chunk.choices[0].delta.content):
            if turn.first_token_s is None:
                turn.first_token_s = time.perf_counter() - started
            turn.answer += text
    agent.messages.append({"role": "assistant", "content": turn.answer})
    turn.done = True
