# SPDX-License-Identifier: Apache-2.0
"""What windows take, against counts made one by one."""

import pytest

from polykv_vllm.ops import WINDOW_PAGE_TOKENS
from polykv_vllm.windows.sizes import (
    PAGE_TOKENS,
    WindowError,
    WindowSizes,
    page_bytes,
    plan_windows,
)

SIZES = WindowSizes(64, 256)
PAGE = page_bytes(2, 128, 2)


def test_a_page_is_that_of_the_kernels() -> None:
    assert PAGE_TOKENS == WINDOW_PAGE_TOKENS
    assert PAGE == 2 * 2 * 32 * 128 * 2


@pytest.mark.parametrize("draft_tokens", [0, 1, 4])
@pytest.mark.parametrize("recent", [0, 1, 2, 31, 32, 33, 34, 64, 65, 256])
def test_pages_hold_what_is_kept_wherever_it_begins(
    recent: int, draft_tokens: int
) -> None:
    sizes = WindowSizes(0, recent, draft_tokens)
    kept = sizes.kept_tokens()
    touched = [len({(b + i) // 32 for i in range(kept)}) for b in range(32)]
    assert sizes.recent_pages == max(touched)


@pytest.mark.parametrize(("sinks", "pages"), [(0, 0), (1, 1), (32, 1), (33, 2)])
def test_pages_of_first_tokens(sinks: int, pages: int) -> None:
    assert WindowSizes(sinks, 0).pages_per_sequence == pages


def test_sequences_are_as_many_as_a_quarter_of_the_memory_has_windows_for() -> None:
    each = SIZES.pages_per_sequence * PAGE
    memory = [40 * each, 60 * each]
    assert plan_windows(SIZES, [PAGE, PAGE], memory, 256, False).num_sequences == 10
    assert plan_windows(SIZES, [PAGE, PAGE], memory, 4, False).num_sequences == 4
    plan = plan_windows(SIZES, [PAGE, PAGE], memory, 25, True)
    assert (plan.num_sequences, plan.num_pages) == (25, 25 * 11)


@pytest.mark.parametrize(("count", "is_asked"), [(5, True), (5, False)])
def test_too_little_memory_is_told(count: int, is_asked: bool) -> None:
    each = SIZES.pages_per_sequence * PAGE
    with pytest.raises(WindowError) as error:
        plan_windows(SIZES, [PAGE], [3 * each], count, is_asked)
    for part in ("64 first", "max_sequences up to 3", "--kv-cache-memory-bytes"):
        assert part in str(error.value)


@pytest.mark.parametrize("text", ["64", "a/b", "64/256/1", "-1/3", ""])
def test_what_are_no_windows(text: str) -> None:
    with pytest.raises(WindowError, match="64/256"):
        WindowSizes.parse(text)
    assert WindowSizes.parse("64/256") == SIZES
