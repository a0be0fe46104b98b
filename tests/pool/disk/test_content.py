# SPDX-License-Identifier: Apache-2.0
import pytest

from polykv_vllm.pool.disk.content import ContentNames, Context

TOKENS = list(range(100))


def names(context: Context | None = None, tokens: list[int] = TOKENS) -> list[bytes]:
    return ContentNames(context or Context(), 32).names(tokens, 3)


def test_a_name_covers_all_tokens_before_it() -> None:
    other = names(tokens=[7, *TOKENS[1:]])
    assert not set(names()) & set(other)
    late = names(tokens=[*TOKENS[:70], 7, *TOKENS[71:]])
    assert late[:2] == names()[:2]
    assert late[2] != names()[2]


def test_names_do_not_depend_on_how_they_are_asked_for() -> None:
    grown = ContentNames(Context(), 32)
    assert grown.names(TOKENS[:40], 1) == names()[:1]
    assert grown.names(TOKENS, 3) == names()


def test_salts_and_adapters_never_meet() -> None:
    """CASE 26: an adapter called like a salt, and one reloaded with other weights."""
    contexts = [
        Context(),
        Context(salt="x"),
        Context(lora=("x", "")),
        Context(lora=("x", "1")),
        Context(lora=("x", "2")),
        Context(salt="x", lora=("x", "1")),
        Context(salt=""),
    ]
    every = [name for context in contexts for name in names(context)]
    assert len(set(every)) == len(every)


def test_a_block_that_is_not_full_has_no_name() -> None:
    with pytest.raises(ValueError, match="not full"):
        ContentNames(Context(), 32).names(TOKENS, 4)
