# SPDX-License-Identifier: Apache-2.0
"""Prompts with and without a chat template; what they share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_vllm.evaluate.tasks.items import (
    MAX_BATCH_TOKENS,
    Draft,
    Item,
    batches,
    encode_items,
)
from polykv_vllm.evaluate.tasks.prompts import PromptEncoder, shared_prefix
from tests.evaluate.byte_tokenizer import byte_tokenizer


def test_a_plain_prompt_begins_with_one_bos() -> None:
    tokenizer = byte_tokenizer()
    encoder = PromptEncoder(tokenizer)
    assert tokenizer.decode(encoder.prompt("ask", "so")) == "<s>ask\n\nso"
    assert tokenizer.decode(encoder.prompt("ask")) == "<s>ask"
    assert tokenizer.decode(encoder.continuation(" it")) == " it"


def test_a_chat_prompt_is_the_templates() -> None:
    tokenizer = byte_tokenizer(chat=True)
    encoder = PromptEncoder(tokenizer)
    assert tokenizer.decode(encoder.prompt("ask", "so")) == "<s>[user]ask[assistant]so"


def test_tokens_are_counted_without_special_ones() -> None:
    encoder = PromptEncoder(byte_tokenizer())
    assert encoder.count(["abc", "", "de"]) == [3, 0, 2]
    assert encoder.count([]) == []


TOKENS = st.lists(st.integers(0, 2), max_size=6).map(tuple)


@given(st.lists(TOKENS, min_size=2, max_size=6))
def test_the_shared_prefix_is_the_longest(prompts: list[tuple[int, ...]]) -> None:
    prefix = shared_prefix(prompts)
    longer = {prompt[: len(prefix) + 1] for prompt in prompts}
    assert all(prompt[: len(prefix)] == prefix for prompt in prompts)
    assert len(longer) > 1 or longer == {prefix}


def test_one_prompt_shares_nothing() -> None:
    assert shared_prefix([(1, 2)]) == shared_prefix([]) == ()


def test_items_that_do_not_fit_are_counted_and_others_asked() -> None:
    encoder = PromptEncoder(byte_tokenizer())
    drafts = [Draft(f"{n}", "x" * n, ("a",)) for n in (5, 40, 6, 7, 50)]
    found = encode_items(drafts, encoder, 3, context_tokens=20, answer_tokens=10)
    assert [item.id for item in found.items] == ["5", "6", "7"]
    assert found.too_long == ["40"]  # 50 was not needed
    found = encode_items(drafts, encoder, 9, context_tokens=20, answer_tokens=10)
    assert (len(found.items), found.asked, found.too_long) == (3, 9, ["40", "50"])


def test_an_item_may_fill_the_context() -> None:
    encoder = PromptEncoder(byte_tokenizer())
    draft = Draft("1", "abc", ("x",), answer="12345")  # 4 tokens and 5
    assert encode_items([draft], encoder, 1, 9, answer_tokens=2).items
    assert not encode_items([draft], encoder, 1, 8, answer_tokens=2).items
    assert not encode_items([draft], encoder, 1, 9, answer_tokens=6).items


@given(st.lists(st.integers(1, MAX_BATCH_TOKENS), max_size=20), st.integers(1, 6))
def test_batches_are_bounded_and_whole(sizes: list[int], most: int) -> None:
    items = [
        Item(Draft(str(n), "", ()), (0,) * size, ()) for n, size in enumerate(sizes)
    ]
    found = list(batches(items, most, answer_tokens=100))
    assert [item for batch in found for item in batch] == items
    for batch in found:
        tokens = sum(len(item.prompt) + 100 for item in batch)
        assert 1 <= len(batch) <= most
        assert len(batch) == 1 or tokens <= MAX_BATCH_TOKENS


def test_a_batch_is_as_full_as_it_may_be() -> None:
    items = [Item(Draft(str(n), "", ()), (0,) * 1000, ()) for n in range(20)]
    assert [len(batch) for batch in batches(items, 50, 24)] == [16, 4]
    assert pytest.approx(16 * 1024) == MAX_BATCH_TOKENS
