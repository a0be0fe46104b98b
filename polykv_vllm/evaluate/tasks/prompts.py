# SPDX-License-Identifier: Apache-2.0
"""From texts to the token ids that a model expects."""

from collections.abc import Sequence
from typing import Any

Tokens = tuple[int, ...]


class PromptEncoder:
    """Makes prompts: with the model's chat template, plain where it has none.

    Args:
        tokenizer: A transformers tokenizer.

    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.is_chat = bool(getattr(tokenizer, "chat_template", None))

    def prompt(self, user: str, assistant: str = "") -> Tokens:
        """Return the tokens of a request.

        Args:
            user: What is asked.
            assistant: How the answer begins: the model goes on from there.

        """
        if not self.is_chat:
            text = f"{user}\n\n{assistant}" if assistant else user
            return self._ids(text, add_special_tokens=True)
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": user}],
            tokenize=False,
            add_generation_prompt=True,
        )
        # The template has written the special tokens.
        return self._ids(text + assistant, add_special_tokens=False)

    def continuation(self, text: str) -> Tokens:
        """Return the tokens of text that follows a prompt."""
        return self._ids(text, add_special_tokens=False)

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text alone."""
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), add_special_tokens=False)
        return [len(ids) for ids in encoded["input_ids"]]

    def _ids(self, text: str, add_special_tokens: bool) -> Tokens:
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens)
        return tuple(encoded["input_ids"])


def shared_prefix(prompts: Sequence[Tokens]) -> Tokens:
    """Return the tokens that all prompts begin with; none for fewer than two."""
    if len(prompts) < 2:
        return ()
    first, last = min(prompts), max(prompts)  # all others lie between these
    for position, (a, b) in enumerate(zip(first, last, strict=False)):
        if a != b:
            return first[:position]
    return first
