# SPDX-License-Identifier: Apache-2.0
"""What a feature changes and what it must not: see `groups.GROUPS` and `requests`.

Each log-probability that an engine gave with a token it generated is compared with what
an engine without the feature gives for the same tokens, in one piece. The models are in
fp32. Matrix products may sum in another order when a batch has another shape, and a
code on the edge of a quantization step may then be another one: `TOLERANCE` allows for
some of those. Noise would be some nats. Mostly the difference is 0.
"""

import json
import re
from typing import Any

import pytest

from tests.e2e.features.conftest import ROOT
from tests.e2e.features.groups import GROUPS, LONGEST
from tests.e2e.features.models import ADAPTERS
from tests.e2e.features.requests import CHUNKS, PROMPTS, REPEATED, SCHEMA, TOKENS, WHOLE
from tests.e2e.features.session import BLOCK_SIZE, Sequence, map_sequences

# The first test waits for all the engines.
pytestmark = pytest.mark.timeout(1800)
TOLERANCE = 0.02  # nats
REFUSED = {"too long", "sleep mode"}
# One layer of three keeps vLLM's own cache: no other engine has that one without.
REPLAYED = {"skip by index", "skip windows"}
Results = dict[str, dict[str, Any]]


def sequences(value: Any) -> list[Sequence]:
    found: list[Sequence] = []
    map_sequences(value, found.append)
    return found


def check(value: Any) -> None:
    found = sequences(value)
    assert found
    for sequence in found:
        assert sequence.difference <= TOLERANCE


@pytest.mark.parametrize("name", [n for n in GROUPS if n not in REFUSED | REPLAYED])
def test_predictions_are_those_without_the_feature(results: Results, name: str) -> None:
    assert "error" not in results[name], results[name]["error"]
    check(results[name])


@pytest.mark.parametrize("name", ["stock", "skip by index"])
def test_hits_are_those_of_vllm(results: Results, name: str) -> None:
    """Case 22: for the same requests a compressed cache hits as vLLM's own does.

    And case 16: of a prompt that is in the cache as a whole the last block is computed.
    """
    hits, others = results["plain"]["hits"], results[name]["hits"]
    assert hits[5:8] == [WHOLE - BLOCK_SIZE, WHOLE, 0]
    assert hits[1] == 300 // BLOCK_SIZE * BLOCK_SIZE
    # Those that skip layers had other requests first.
    assert others[1:] == hits[1:] and sum(hits) > 2000


def test_nothing_is_cached_without_prefix_caching(results: Results) -> None:
    plain, without = results["plain"], results["no prefix caching"]
    assert [s.cached for s in sequences(without)] == [0] * 2 * len(PROMPTS)
    for one, other in zip(sequences(without), sequences(texts_of(plain)), strict=True):
        assert one.tokens == other.tokens


def texts_of(result: dict[str, Any]) -> dict[str, Any]:
    return {kind: result[kind] for kind in ("alone", "together")}


def test_reset_prefix_cache(results: Results) -> None:
    assert results["plain"]["reset"] is True
    assert results["plain"]["alone"][0].cached == 0  # it had been sent before


@pytest.mark.parametrize("k", [1, 3])
def test_drafts_change_no_text(results: Results, k: int) -> None:
    """Case 21: the text with ngram speculative decoding is the greedy one."""
    result, plain = results[f"ngram {k}"], results["plain"]
    drafted = result["num_draft_tokens"]
    assert k * result["num_drafts"] >= drafted > result["num_drafts"] * (k - 1)
    assert drafted > result["num_accepted_tokens"] > 20
    for kind in ("alone", "together"):
        for one, other in zip(result[kind], plain[kind], strict=True):
            assert one.tokens == other.tokens
            assert one.cached == other.cached


def test_drafts_with_sliding_windows(results: Results) -> None:
    assert results["ngram 3, windows"]["num_accepted_tokens"] > 20


def test_adapters_do_not_share_blocks(results: Results) -> None:
    """The same prompt under two adapters: each reads what it wrote itself."""
    result = results["lora"]
    assert [s.cached for s in result["alone"]] == [0] * 3
    hit = (len(PROMPTS[0]) - 1) // BLOCK_SIZE * BLOCK_SIZE
    for kind in ("again", "together"):
        for one, other in zip(result[kind], result["alone"], strict=False):
            assert one.cached == hit
            assert one.tokens == other.tokens
    assert [s.judge for s in result["together"]] == list(ADAPTERS)
    assert len({tuple(s.tokens) for s in result["alone"]}) == 3


def test_a_reloaded_adapter_finds_nothing_of_the_old_one(results: Results) -> None:
    """CASE 26: neither in memory, where vLLM's key is name and path, nor on disk."""
    result = {name: one for name, (one,) in results["lora, pool"].items()}
    hit = (len(PROMPTS[0]) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert {name: one.cached for name, one in result.items()} == {
        "first": 0,
        "again": hit,
        "another": 0,
        "another again": hit,
        # Nothing says when the engine has the new files: nothing is shared.
        "in place": 0,
        "in place again": 0,
        "from disk": hit,
    }
    north, south = result["first"].tokens, result["another"].tokens
    assert north != south
    for name, one in result.items():
        assert one.tokens == (south if "another" in name else north), name


def test_embeddings_as_prompts(results: Results) -> None:
    miss, hit = results["requests"]["embeddings"]
    assert (miss.cached, hit.cached) == (0, 96)
    assert miss.tokens == hit.tokens


@pytest.mark.parametrize("length", REPEATED)
def test_the_whole_prompt_is_cached(results: Results, length: int) -> None:
    """Case 16: sent twice, then with the log-probabilities of the prompt."""
    result = results["requests"]["repeated"][str(length)]
    first, second, scored = result["sequences"]
    hit = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    # vLLM does not read its cache for a request that wants all log-probabilities.
    assert [s.cached for s in (first, second, scored)] == [0, hit, 0]
    assert first.tokens == second.tokens == scored.tokens
    assert len(result["entries"]) == length - 1
    for entries, token in zip(result["entries"], scored.prompt[1:], strict=True):
        assert 3 <= len(entries) <= 4 and token in [e[2] for e in entries]
        logprobs = [logprob for _, logprob, _ in entries]
        assert logprobs == sorted(logprobs, reverse=True)


def test_structured_output(results: Results) -> None:
    result = results["requests"]["structured"]
    assert result["cached"] == [0, 0, 32, 64]
    assert result["texts"][:2] == result["texts"][2:]
    for miss, hit in zip(result["logprobs"][:2], result["logprobs"][2:], strict=True):
        assert hit == pytest.approx(miss, abs=TOLERANCE)
    for text in result["texts"]:
        answer = json.loads(text)
        assert list(answer) == SCHEMA["required"]
        assert answer["role"] in ("reader", "writer")
        assert answer["calm"] in (True, False)
        assert 0 <= answer["level"] <= 9


def test_beam_search(results: Results) -> None:
    result = results["requests"]["beams"]
    found = result["sequences"]
    assert len({tuple(s.tokens) for s in found}) == 3
    sums = [sum(s.judged) for s in found]
    assert result["sums"] == pytest.approx(sums, abs=8 * TOLERANCE)
    assert result["sums"] == sorted(result["sums"], reverse=True)
    assert result["sums"][0] >= sum(result["greedy"].logprobs) - 8 * TOLERANCE


@pytest.mark.parametrize("size", CHUNKS)
def test_any_chunk_size(results: Results, size: int | None) -> None:
    """Cases 17 and 18: cold, warm, and over a longer and longer history."""
    found, whole = results["chunks"][str(size)], results["chunks"]["None"]
    assert [s.cached for s in found] == [0, 672, 256, 256]
    for one, other in zip(found, whole, strict=True):
        assert one.tokens == other.tokens
    cold, warm = found[:2]
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=TOLERANCE)


def test_preemption(results: Results) -> None:
    assert results["preemption"]["preemptions"] > 0
    assert all(len(s.tokens) == 60 for s in results["preemption"]["texts"])


def test_requests_that_fill_the_pool(results: Results) -> None:
    """Case 13: one request may need every block; three such requests take turns."""
    result = results["longest"]
    for sequence in (*result["alone"], *result["together"]):
        assert len(sequence.prompt) + len(sequence.tokens) == LONGEST
    assert "longer than the maximum model length" in result["refusal"]


def test_requests_longer_than_the_pool_are_refused(results: Results) -> None:
    """Case 13: a length that no request could reach is refused before any comes."""
    (maximum,) = re.findall(
        r"estimated maximum model length is (\d+)", results["too long"]["error"]
    )
    assert int(maximum) == LONGEST


@pytest.mark.parametrize("name", sorted(REPLAYED))
def test_skipped_layers_leave_the_others_right(results: Results, name: str) -> None:
    """The layers that remain attend as the reference does, to the same bytes."""
    result = results[name]
    assert "error" not in result, result["error"]
    ours = [layer == "PolyKVImpl" for layer in result["layers"]]
    expected = {"skip by index": [True, False, True]}
    assert ours == expected.get(name, [False, True, False])
    assert 0 < result["replay"] <= 0.005  # 2^-14 of 25 nats, 6 sublayers


def test_async_scheduling_and_sleep(results: Results) -> None:
    """The CPU platform has neither: the one is off, the other ignored or refused."""
    result = results["async, sleep"]
    assert result["async"] is False
    texts = [s.tokens for s in result["texts"]]
    assert texts == [s.tokens[:16] for s in results["plain"]["together"]]
    refusal = results["sleep mode"]["error"]
    assert "Sleep mode is not supported on current platform" in refusal


@pytest.mark.compat
def test_vllm_gives_an_adapter_to_requests_without_one() -> None:
    """vLLM's CPU operator takes the last adapter for the index -1, "no adapter".

    With its own cache, too: docs/features.md warns of it. When this fails, the warning
    can go, and `requests.adapters` may put the model itself into the batch.
    """
    import torch
    from vllm.lora.ops.torch_ops import bgmv_expand

    output = torch.zeros(1, 2)
    weights = torch.ones(2, 2, 3)
    bgmv_expand(torch.ones(1, 3), weights, output, torch.tensor([-1]))
    assert output.tolist() == [[3.0, 3.0]]


def test_the_document_names_tests_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/features.md").read_text()))
    files = (ROOT / "tests" / "e2e").rglob("test_*.py")
    defined = {
        n for f in files for n in re.findall(r"^def (test_\w+)", f.read_text(), re.M)
    }
    assert len(named) > 5 and named <= defined


def test_the_table_has_only_what_is_tested() -> None:
    assert GROUPS.keys() >= REFUSED | REPLAYED
    assert TOKENS >= 16  # what `requests.switched_off` generates
