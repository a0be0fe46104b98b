# SPDX-License-Identifier: Apache-2.0
"""`Engine` on transformers: the same formats and kernels, and nothing of vLLM.

An oracle for the real engine: other model code, other scheduling, other bookkeeping of
the cache. It computes in fp32, whatever the arm: in bf16, transformers rounds more
often than vLLM, which moves perplexity by as much as the formats that are to be
checked. It keeps the caches of what it has scored, so that later requests read their
prefixes there.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from polykv_vllm.calibrate.artifact import load_calibration
from polykv_vllm.calibrate.fold import fold_model
from polykv_vllm.evaluate.arms import NONE, Arm
from polykv_vllm.evaluate.engine import Generation, ScoreRequest, TokenScores
from polykv_vllm.evaluate.errors import EngineError
from polykv_vllm.evaluate.scoring import Head, score
from polykv_vllm.evaluate.states import load_states, save_states
from polykv_vllm.formats import get_format
from polykv_vllm.keys import AUTO, KeyTransform

if TYPE_CHECKING:
    from polykv_vllm.evaluate.vllm_engine import EngineSetup

_CHUNK_TOKENS = 512
_KEPT_PREFIXES = 4


class HfEngine:
    """A transformers model with one arm's cache, in this process.

    Args:
        setup: Common to all arms.
        arm: Whose cache it has; "auto" as cache dtype is transformers' own, in fp32.
        bytes_per_token: Of the arm's cache, all layers.
        stage: Told in a few words what is being done.

    Raises:
        EngineError: transformers has no such cache.
        UnsupportedError: The model cannot be served with this cache.

    """

    def __init__(
        self,
        setup: EngineSetup,
        arm: Arm,
        bytes_per_token: int,
        stage: Callable[[str], None] = lambda words: None,
    ) -> None:
        from transformers import AutoModelForCausalLM

        if not (arm.is_ours or arm.kv_cache_dtype == "auto"):
            raise EngineError(
                f"arm {arm.name}: the cache {arm.kv_cache_dtype} is vLLM's; "
                "transformers has its own (bf16, fp32) and the polykv formats"
            )
        if arm.windows is not None:
            raise EngineError(
                f"arm {arm.name}: windows of full precision are measured with "
                "--engine vllm"
            )
        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        stage("loading the model")
        self.tokenizer, self.bytes_per_token = setup.tokenizer, bytes_per_token
        self._arm, self._states = arm, setup.states
        self._model = AutoModelForCausalLM.from_pretrained(
            setup.model, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._head = _head_of(self._model)
        # Of keys of few bits, as the engine has them; None: what the treatment says.
        self._calibrated_keys: list[KeyTransform] | None = None
        if arm.calibration != NONE:
            stage("folding the calibration")
            calibration = load_calibration(Path(arm.calibration))
            fmt = get_format(arm.kv_cache_dtype)
            fold_model(self._model, calibration, fmt)
            if fmt.is_low_bit and arm.key_treatment == AUTO:
                self._calibrated_keys = calibration.key_transforms()
        ends = self._model.generation_config.eos_token_id
        self._ends: list[int] = ends if isinstance(ends, list) else [ends]
        self._kept: deque[tuple[tuple[int, ...], Any]] = deque(maxlen=_KEPT_PREFIXES)
        cache = self._new_cache()
        self.facts: dict[str, Any] = {
            "attention": [self._model.config._attn_implementation],
            "dtype": "float32",
            "key_treatment": getattr(cache, "key_treatment", None),
            "vocab_size": self._head.weight.shape[0],
            "threads": torch.get_num_threads(),
        }

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest]) -> Iterator[TokenScores]:
        """Yield the scores of each request, in order, as they are computed.

        Raises:
            EngineError: A prefix that should be in the cache is not, or is scored.

        """
        for request in requests:
            hidden = self._hidden(request)
            tokens, begin = request.token_ids, request.begin
            reference = None
            if not self._arm.is_reference:
                reference = load_states(self._states, request.key, tokens, begin)
            scores = score(hidden, torch.tensor(tokens[begin:]), self._head, reference)
            if self._arm.is_reference:
                save_states(self._states, request.key, tokens, begin, hidden)
            yield TokenScores(
                scores.nll.numpy(),
                None if scores.kld is None else scores.kld.numpy(),
                None if scores.agrees is None else scores.agrees.numpy(),
            )

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        stop: Sequence[str] = (),
    ) -> list[Generation]:
        """Answer prompts greedily, all of them in one batch.

        What they all begin with is computed once; all but the first read it.
        """
        rows = [tuple(prompt) for prompt in prompts]
        # A row needs a token of its own: the model is to be asked for the next.
        shared = min(_common_tokens(rows), min(map(len, rows)) - 1)
        cache, cached = self._prefix(rows[0][:shared])
        if shared:
            self._run(rows[0][cached:shared], cache)
            self._kept.append((rows[0][:shared], self._copy(cache)))
        batch = self._copy(cache, len(rows)) if shared else self._new_cache()
        own = [row[shared:] for row in rows]
        answers = self._generate(own, batch, shared, max_tokens, stop)
        read = [cached] + [shared] * (len(rows) - 1)
        return [
            self._generation(answer, stop, count)
            for answer, count in zip(answers, read, strict=True)
        ]

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._kept.clear()

    def close(self) -> None:
        """Let go of the model and the caches."""
        self._kept.clear()
        del self._model

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        from polykv_vllm.hf import IMPLEMENTATION, PolyKVCache

        if not self._arm.is_ours:
            # Without the config: layers with a window would forget what a fork needs.
            return DynamicCache()
        self._model.set_attn_implementation(IMPLEMENTATION)
        if self._calibrated_keys is not None:
            return PolyKVCache(
                self._model.config,
                self._arm.kv_cache_dtype,
                key_transforms=self._calibrated_keys,
            )
        return PolyKVCache.for_model(
            self._model, self._arm.kv_cache_dtype, key_treatment=self._arm.key_treatment
        )

    def _copy(self, cache: Any, rows: int = 1) -> Any:
        if self._arm.is_ours:
            return cache.fork(rows)
        copied = copy.deepcopy(cache)
        copied.batch_repeat_interleave(rows)
        return copied

    def _prefix(self, tokens: tuple[int, ...]) -> tuple[Any, int]:
        """Return a cache of the longest known prefix of tokens, and its length."""
        lengths = [_common_tokens([known, tokens]) for known, _ in self._kept]
        longest = max(lengths, default=0)
        if not longest:
            return self._new_cache(), 0
        known, kept = self._kept[lengths.index(longest)]
        cache = self._copy(kept)
        if len(known) > longest:
            cache.crop(longest - len(known))
        return cache, longest

    def _run(self, tokens: Sequence[int], cache: Any) -> torch.Tensor:
        """Bring tokens into a cache; return their last hidden states, one row each."""
        states = [
            self._model.base_model(
                chunk.unsqueeze(0), past_key_values=cache, use_cache=True
            ).last_hidden_state[0]
            for chunk in torch.tensor(tokens).long().split(_CHUNK_TOKENS)
            if len(chunk)
        ]
        return torch.cat(states) if states else torch.empty(0)

    def _hidden(self, request: ScoreRequest) -> torch.Tensor:
        """Return the states that predict `token_ids[begin:]`."""
        asked, tokens = request.cached_tokens, request.token_ids
        if asked >= request.begin:
            raise EngineError(
                f"{request.key}: position {request.begin} is to be scored, but "
                f"{asked} tokens are to come from the cache, where no states are"
            )
        cache, cached = self._prefix(tokens[:asked])
        if cached < asked:
            raise EngineError(
                f"{request.key}: {asked} leading tokens should have been in the prefix "
                f"cache, {cached} were: an earlier request must bring them there"
            )
        hidden = self._run(tokens[asked:], cache)
        if not asked:
            self._kept.append((tokens, cache))
        return hidden[request.begin - 1 - asked : -1]

    def _generate(
        self,
        rows: list[tuple[int, ...]],
        cache: Any,
        shared: int,
        max_tokens: int,
        stop: Sequence[str],
    ) -> list[list[int]]:
        """Return the new tokens of each row, with what may follow its end."""
        from transformers import GenerationConfig

        width = max(map(len, rows))
        tokens = torch.tensor([(0,) * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        if self._arm.is_ours:
            cache.expect_padding(mask)

        def has_stopped(ids: torch.Tensor, scores: Any) -> torch.Tensor:
            texts = [self._decode(row) for row in ids[:, width:].tolist()]
            return torch.tensor([any(each in text for each in stop) for text in texts])

        output = self._model.generate(
            tokens,
            attention_mask=torch.cat([torch.ones(len(rows), shared).long(), mask], 1),
            past_key_values=cache,
            stopping_criteria=[has_stopped] if stop else None,
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=self._ends,
                # Follows the end of a row, where it is cut off again.
                pad_token_id=self._ends[0],
            ),
        )
        answers: list[list[int]] = output[:, width:].tolist()
        return answers

    def _generation(
        self, tokens: list[int], stop: Sequence[str], cached: int
    ) -> Generation:
        """Cut an answer where it ends: a batch goes on until its last row ends."""
        for count, token in enumerate(tokens, 1):
            text = self._decode(tokens[:count]) if stop else ""
            places = [place for each in stop if (place := text.find(each)) >= 0]
            if places:
                text = text[: min(places)]
                return Generation(tuple(tokens[:count]), text, cached, "stop")
            if token in self._ends:
                answer = tokens[:count]
                return Generation(tuple(answer), self._decode(answer), cached, "stop")
        return Generation(tuple(tokens), self._decode(tokens), cached, "length")

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def _common_tokens(rows: Sequence[tuple[int, ...]]) -> int:
    """Return how many tokens all rows begin with."""
    first, *others = rows
    different = (
        place
        for place, token in enumerate(first)
        if any(len(row) <= place or row[place] != token for row in others)
    )
    return next(different, len(first))


def _head_of(model: Any) -> Head:
    """Return the model's way from hidden states to logits."""
    layer = model.get_output_embeddings()
    config = model.config.get_text_config(decoder=True)
    scale = getattr(config, "logit_scale", None)
    return Head(
        layer.weight.detach(),
        None if layer.bias is None else layer.bias.detach(),
        1.0 if scale is None else scale,
        getattr(config, "final_logit_softcapping", None),
    )
