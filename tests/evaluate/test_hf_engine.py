# SPDX-License-Identifier: Apache-2.0
"""The transformers engine, on small models that it loads from disk."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polykv_vllm.evaluate.arms import Arm, parse_arm
from polykv_vllm.evaluate.engine import ScoreRequest
from polykv_vllm.evaluate.errors import EngineError
from polykv_vllm.evaluate.hf_engine import HfEngine
from polykv_vllm.evaluate.states import StatesError
from polykv_vllm.evaluate.suite import Demand
from polykv_vllm.evaluate.vllm_engine import EngineSetup
from tests.calibrate.models import calibrate_random
from tests.hf.models import tiny_model, tokens

FAMILIES = ("qwen2", "gemma3")


class Numbers:
    """Decodes token 7 to "<7>"."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(f"<{i}>" for i in ids if i > 2)


@pytest.fixture(autouse=True)
def _one_thread(one_torch_thread: None) -> None:
    """Apply to every test of this file."""


@pytest.fixture(params=FAMILIES)
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> EngineSetup:
    tiny_model(request.param).save_pretrained(tmp_path / "model")
    (tmp_path / "states").mkdir()
    return EngineSetup(
        model=str(tmp_path / "model"),
        tokenizer=Numbers(),
        context_tokens=512,
        demand=Demand(512, 512, 3),
        states=tmp_path / "states",
        logs=tmp_path,
    )


def engine(setup: EngineSetup, name: str) -> HfEngine:
    return HfEngine(setup, parse_arm(name), 0)


def load(setup: EngineSetup) -> Any:
    """Return the model as transformers has it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.float32)


def request(key: str, count: int = 120, begin: int = 60, **more: Any) -> ScoreRequest:
    return ScoreRequest(key, tuple(tokens(count)[0].tolist()), begin, **more)


def test_the_reference_scores_as_the_model_does(setup: EngineSetup) -> None:
    asked = request("one")
    bf16 = engine(setup, "bf16")
    (scores,) = bf16.score([asked])
    assert scores.kld is None and scores.agrees is None
    ids = torch.tensor([asked.token_ids])
    with torch.no_grad():
        logits = bf16._model(ids).logits[0, 59:-1].log_softmax(-1)
    expected = -logits.gather(1, ids[0, 60:, None])[:, 0]
    np.testing.assert_allclose(scores.nll, expected.numpy(), atol=1e-4)


def test_formats_are_compared_with_the_reference(setup: EngineSetup) -> None:
    asked = [request("one"), request("two", 100, 1)]
    list(engine(setup, "bf16").score(asked))
    klds = {}
    for name in ("fp32", "polykv_k8v8", "polykv_k8v3", "polykv_k8v8+hadamard"):
        scores = list(engine(setup, name).score(asked))
        assert [len(s.nll) for s in scores] == [60, 99]
        assert all(s.kld is not None and s.agrees is not None for s in scores)
        klds[name] = float(np.mean([s.kld.mean() for s in scores]))
    assert klds["fp32"] < 1e-6 < klds["polykv_k8v8"] < klds["polykv_k8v3"]
    assert klds["polykv_k8v8+hadamard"] not in (0.0, klds["polykv_k8v8"])


def test_keys_of_few_bits_go_through_their_calibration(
    setup: EngineSetup, tmp_path: Path
) -> None:
    calibrate_random(load(setup), tmp_path / "calibration")
    asked = [request("one")]
    list(engine(setup, "bf16").score(asked))
    klds = {}
    for name in ("polykv_k4v4", "polykv_k4v4+calibrated"):
        served = HfEngine(setup, parse_arm(name, tmp_path / "calibration"), 0)
        klds[name] = float(next(iter(served.score(asked))).kld.mean())
    assert served.facts["key_treatment"] == "matrix"
    plain, calibrated = klds.values()
    assert 0 < calibrated < 2 * plain and calibrated != plain


@pytest.mark.parametrize("arm", ["bf16", "polykv_k8v8"])
def test_a_prefix_from_the_cache_changes_nothing(setup: EngineSetup, arm: str) -> None:
    whole = engine(setup, "bf16")
    asked = request("one")
    list(whole.score([asked]))
    ours = engine(setup, arm)
    (expected,) = ours.score([asked])
    cached = request("one", cached_tokens=50)
    for _ in range(2):  # what reads the prefix must leave it as it is
        (scores,) = ours.score([cached])
        np.testing.assert_allclose(scores.nll, expected.nll, atol=0.02)
    ours.reset_prefix_cache()
    with pytest.raises(EngineError, match="50 leading tokens should have been"):
        list(ours.score([cached]))


def test_scores_are_not_asked_of_cached_tokens(setup: EngineSetup) -> None:
    ours = engine(setup, "bf16")
    with pytest.raises(EngineError, match="position 60 is to be scored, but 60"):
        list(ours.score([request("one", cached_tokens=60)]))


def test_a_format_needs_the_reference(setup: EngineSetup) -> None:
    with pytest.raises(StatesError, match="no hidden states for one"):
        list(engine(setup, "polykv").score([request("one")]))


@pytest.mark.parametrize("arm", ["bf16", "polykv_k8v8"])
def test_a_batch_answers_as_its_prompts_alone(setup: EngineSetup, arm: str) -> None:
    document = tokens(70)[0].tolist()
    prompts = [[*document, *ids] for ids in ([9, 9, 4], [8], [7, 6, 5, 4, 3, 9, 8])]
    together = engine(setup, arm)
    answers = together.generate(prompts, 8)
    assert [a.cached_tokens for a in answers] == [0, 70, 70]
    assert together.generate(prompts[:1], 8)[0].cached_tokens == 70
    for prompt, answer in zip(prompts, answers, strict=True):
        (alone,) = engine(setup, arm).generate([prompt], 8)
        assert alone.token_ids == answer.token_ids
        assert alone.text == answer.text == Numbers().decode(answer.token_ids, True)
        assert answer.finish_reason == "length" or answer.token_ids[-1] == 2


def test_answers_end_where_they_are_told_to(setup: EngineSetup) -> None:
    prompts = [tokens(40)[0].tolist(), tokens(30, seed=1)[0].tolist()]
    ours = engine(setup, "polykv_k8v8")
    first, second = ours.generate(prompts, 8)
    stop = f"<{first.token_ids[3]}>"
    cut = ours.generate(prompts, 8, [stop])
    length = first.token_ids.index(first.token_ids[3]) + 1
    assert cut[0].token_ids == first.token_ids[:length]
    assert cut[0].finish_reason == "stop" and stop not in cut[0].text
    if stop not in second.text:
        assert cut[1].token_ids == second.token_ids


def test_a_cache_of_vllm_is_refused(setup: EngineSetup) -> None:
    with pytest.raises(EngineError, match="the cache fp8 is vLLM's"):
        engine(setup, "fp8")


def test_the_record_says_what_computed(setup: EngineSetup) -> None:
    facts = HfEngine(setup, Arm("polykv+hadamard", "polykv", "bfloat16", "hadamard"), 0)
    assert facts.facts["attention"] == ["polykv"]
    assert facts.facts["key_treatment"] == "hadamard"
    assert facts.facts["dtype"] == "float32" and math.isfinite(facts.bytes_per_token)
