# SPDX-License-Identifier: Apache-2.0
"""What a task asks, before and after it is tokenised."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from polykv_vllm.evaluate.tasks.prompts import PromptEncoder, Tokens

MAX_BATCH_TOKENS = 16_384
"""Prompts and answers of one batch together: what the cache of an engine must hold."""


@dataclass(frozen=True)
class Draft:
    """One item as text.

    Attributes:
        id: Stays the same from run to run; fit for a file name.
        user: What is asked.
        accepted: Answers that count.
        assistant: How the answer begins.
        answer: Expected continuation after `assistant`, for its likelihood.
        group: Splits the score, such as by depth; "" where nothing is to be split.

    """

    id: str
    user: str
    accepted: tuple[str, ...]
    assistant: str = ""
    answer: str = ""
    group: str = ""


@dataclass(frozen=True)
class Item:
    """One item, ready to be asked.

    Attributes:
        draft: Its text.
        prompt: Tokens.
        answer: Tokens of the expected continuation; empty if it is not scored.

    """

    draft: Draft
    prompt: Tokens
    answer: Tokens

    @property
    def id(self) -> str:
        """Of the draft."""
        return self.draft.id


@dataclass
class ItemSet:
    """The items of a task.

    Attributes:
        items: Ready to be asked.
        too_long: Ids of those that the model's context does not hold.
        asked: How many were wanted.

    """

    asked: int
    items: list[Item] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)


def encode_items(
    drafts: Iterable[Draft],
    encoder: PromptEncoder,
    asked: int,
    context_tokens: int,
    answer_tokens: int,
) -> ItemSet:
    """Tokenise the first `asked` drafts that fit; pass over those that do not.

    Args:
        drafts: In order; read no further than needed.
        encoder: Of the model.
        asked: Most items.
        context_tokens: Longest request that the model takes.
        answer_tokens: Longest generated answer.

    """
    found = ItemSet(asked)
    for draft in drafts:
        prompt = encoder.prompt(draft.user, draft.assistant)
        answer = encoder.continuation(draft.answer) if draft.answer else ()
        if len(prompt) + max(answer_tokens, len(answer)) > context_tokens:
            found.too_long.append(draft.id)
        else:
            found.items.append(Item(draft, prompt, answer))
        if len(found.items) == asked:
            break
    return found


def batches(
    items: Sequence[Item], most: int, answer_tokens: int
) -> Iterator[list[Item]]:
    """Yield items in order, at most `most` and MAX_BATCH_TOKENS tokens at a time."""
    batch: list[Item] = []
    tokens = 0
    for item in items:
        size = len(item.prompt) + max(answer_tokens, len(item.answer))
        if batch and (len(batch) == most or tokens + size > MAX_BATCH_TOKENS):
            yield batch
            batch, tokens = [], 0
        batch.append(item)
        tokens += size
    if batch:
        yield batch
