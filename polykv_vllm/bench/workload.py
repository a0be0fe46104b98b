# SPDX-License-Identifier: Apache-2.0
"""The prompts of a case, as token ids: their lengths are exact in every model."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polykv_vllm.bench.errors import BenchError
from polykv_vllm.bench.scenario import Case, Scenario

Prompt = list[int]

_FIRST_ID, _LAST_ID = 1000, 30_000  # ordinary tokens of usual vocabularies
_TEXT_SUFFIXES = (".txt", ".md")
_TEXT_FIELDS = ("system", "prompt", "text")


class Workload:
    """Makes the same prompts for every arm.

    Args:
        scenario: Lengths, groups and teams.
        vocab_size: Of the model.
        real_prompts: Shared prompts of `prompts_dir`; empty for synthetic ones.

    """

    def __init__(
        self, scenario: Scenario, vocab_size: int, real_prompts: list[Prompt]
    ) -> None:
        self._scenario = scenario
        self._last_id = min(_LAST_ID, vocab_size - 1)
        self._first_id = min(_FIRST_ID, self._last_id // 2)
        self._real_prompts = real_prompts

    def prompts(self, case: Case, phase: str, repetition: int) -> list[Prompt]:
        """Return one prompt for each agent: its shared part, then its own.

        Phases and repetitions differ in the agents' own parts only.
        """
        return [
            self.shared(case, agent) + self._own(phase, repetition, agent)
            for agent in range(case.agents)
        ]

    def shared(self, case: Case, agent: int) -> Prompt:
        """Return the part of the agent's prompt that others of its team have, too."""
        if case.shared_tokens is None:
            return self._real_prompts[agent % len(self._real_prompts)]
        groups, nested = self._scenario.groups, self._scenario.nested
        group = agent % groups
        if nested is None:
            return self._tokens(case.shared_tokens, "group", group)
        team = agent // groups % nested.teams
        top = self._tokens(case.shared_tokens - nested.team_tokens, "group", group)
        return top + self._tokens(nested.team_tokens, "team", group, team)

    def documents(self, count: int, tokens: int, seed: int) -> list[Prompt]:
        """Return `count` prompts of `tokens` tokens that have nothing in common."""
        return [self._tokens(tokens, "document", seed, n) for n in range(count)]

    def shared_document(self, count: int, tokens: int, own: int) -> list[Prompt]:
        """Return `count` prompts: one document of `tokens` tokens, then `own` more."""
        document = self._tokens(tokens, "memory")
        return [document + self._tokens(own, "memory", n) for n in range(count)]

    def shared_tokens(self, case: Case) -> list[int]:
        """Return for each agent how long the shared part of its prompt is."""
        return [len(self.shared(case, agent)) for agent in range(case.agents)]

    def _own(self, phase: str, repetition: int, agent: int) -> Prompt:
        return self._tokens(self._scenario.own_tokens, phase, repetition, agent)

    def _tokens(self, count: int, *seed: Any) -> Prompt:
        generator = random.Random("/".join(map(str, seed)))
        return [generator.randint(self._first_id, self._last_id) for _ in range(count)]


def needed_blocks(workload: Workload, case: Case, scenario: Scenario) -> int:
    """Return the blocks of all agents of a case with one copy of what they share."""
    size = scenario.block_size
    shared: set[tuple[int, ...]] = set()
    private = 0
    for agent in range(case.agents):
        prompt = workload.shared(case, agent)
        whole = len(prompt) // size
        shared |= {tuple(prompt[: size * (n + 1)]) for n in range(whole)}
        total = len(prompt) + scenario.own_tokens + scenario.output_tokens
        private += -(-total // size) - whole
    return len(shared) + private


def write_dataset(path: Path, prompts: list[Prompt]) -> None:
    """Write prompts as the JSONL file that vLLM's `custom` dataset reads."""
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))


def read_prompts(folder: Path, tokenizer: Any) -> list[Prompt]:
    """Read agent prompts: text files, and JSONL files with a prompt in each line.

    A line's prompt is its `system`, `prompt` or `text`, or the first system message of
    its `messages`.

    Raises:
        BenchError: No folder, or no prompt in it.

    """
    if not folder.is_dir():
        raise BenchError(f"prompts_dir {folder} is not a directory")
    texts = [text for path in sorted(folder.iterdir()) for text in _texts(path)]
    if not texts:
        raise BenchError(
            f"prompts_dir {folder} has no prompt: {', '.join(_TEXT_SUFFIXES)} files, "
            f"or .jsonl files with {', '.join(_TEXT_FIELDS)} or messages in each line"
        )
    return [list(tokenizer(text).input_ids) for text in texts]


def _texts(path: Path) -> Iterator[str]:
    if path.suffix in _TEXT_SUFFIXES:
        if path.name.lower().startswith("readme"):
            return
        yield path.read_text()
    elif path.suffix == ".jsonl":
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise BenchError(f"{path}:{number}: no JSON: {error}") from error
            if (text := _text_of(record)) is not None:
                yield text


def _text_of(record: Any) -> str | None:
    if not isinstance(record, dict):
        return None
    for field in _TEXT_FIELDS:
        if isinstance(record.get(field), str):
            return str(record[field])
    for message in record.get("messages", []):
        if message.get("role") == "system":
            return str(message["content"])
    return None
