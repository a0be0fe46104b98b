# SPDX-License-Identifier: Apache-2.0
"""Runs in vLLM's worker: keeps last hidden states and turns them into scores.

Mixed into the worker class by `worker_extension_cls`. A hook on the model sees the
hidden states of every step. Rows belong to requests as the runner has laid out its
batch: in the order of `input_batch.req_ids`, `query_start_loc` apart. A request is
known by its prompt, for the engine gives it an id of its own.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from polykv_vllm.evaluate.scoring import Head, score
from polykv_vllm.evaluate.states import load_states, save_states
from polykv_vllm.windows.sizes import PLAN_ATTRIBUTE


class WorkerError(RuntimeError):
    """The engine cannot be scored; the message says why."""


@dataclass
class _Wanted:
    """A request whose states are collected: all that predict `tokens[begin:]`."""

    key: str
    tokens: tuple[int, ...]
    begin: int
    pieces: dict[int, torch.Tensor] = field(default_factory=dict)

    def take(self, first: int, hidden: torch.Tensor) -> None:
        """Keep the rows that predict scored tokens.

        Args:
            first: Position of the first row.
            hidden: `[positions, hidden_size]`.

        """
        low = max(self.begin - 1, first)
        high = min(len(self.tokens) - 1, first + len(hidden))
        if low < high:
            self.pieces[low] = hidden[low - first : high - first].clone()

    def hidden(self) -> torch.Tensor:
        """Return all rows, `[len(tokens) - begin, hidden_size]`.

        Raises:
            WorkerError: Some were not computed, because they were in the cache.

        """
        position = self.begin - 1
        for first, rows in sorted(self.pieces.items()):
            if first != position:
                break
            position += len(rows)
        if position != len(self.tokens) - 1:
            raise WorkerError(
                f"{self.key}: position {position} was not computed (it came from the "
                "prefix cache), so what it predicts cannot be scored"
            )
        return torch.cat([rows for _, rows in sorted(self.pieces.items())])


class EvaluationWorker:
    """The calls that `vllm_engine` makes through `collective_rpc`."""

    def polykv_eval_start(self, states: str, is_reference: bool) -> dict[str, Any]:
        """Hook the model.

        Args:
            states: Folder of the reference's hidden states.
            is_reference: Whether this engine writes them; else it reads them.

        Returns:
            What the engine computes with, for the record.

        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self._states, self._is_reference = Path(states), is_reference
        self._head = _head_of(runner.model, runner.parallel_config)
        self._wanted: dict[tuple[int, ...], _Wanted] = {}
        runner.model.register_forward_hook(self._keep)
        layers = self.compilation_config.static_forward_context  # type: ignore
        impls = [layer.impl for layer in layers.values()]
        transforms = [getattr(impl, "key_transform", None) for impl in impls]
        treatments = sorted({each.treatment for each in transforms if each})
        folded = [getattr(impl, "calibration", None) for impl in impls]
        calibrations = sorted({digest for digest in folded if digest is not None})
        return {
            "attention": sorted({type(impl).__name__ for impl in impls}),
            "key_treatment": ", ".join(treatments) or None,
            "calibration": ", ".join(calibrations) or None,
            "windows": _windows_of(runner),
            "vocab_size": self._head.weight.shape[0],
            "threads": torch.get_num_threads(),
        }

    def polykv_eval_expect(self, requests: list[dict[str, Any]]) -> None:
        """Collect states for requests, and for none of those before.

        Args:
            requests: Each with "prompt" (the engine's), "key", "tokens" and "begin".

        """
        self._wanted = {
            tuple(each["prompt"]): _Wanted(
                each["key"], tuple(each["tokens"]), each["begin"]
            )
            for each in requests
        }

    def polykv_eval_scores(self, prompt: list[int]) -> dict[str, list[Any] | None]:
        """Score a finished request; lists of `[num_scored]`."""
        wanted = self._wanted.pop(tuple(prompt))
        hidden = wanted.hidden()
        targets = torch.tensor(wanted.tokens[wanted.begin :])
        request = (self._states, wanted.key, wanted.tokens, wanted.begin)
        reference = None if self._is_reference else load_states(*request)
        scores = score(hidden, targets, self._head, reference)
        if self._is_reference:
            save_states(*request, hidden)
        return {
            "nll": scores.nll.tolist(),
            "kld": None if scores.kld is None else scores.kld.tolist(),
            "agrees": None if scores.agrees is None else scores.agrees.tolist(),
        }

    def _keep(self, model: Any, inputs: Any, hidden: torch.Tensor) -> None:
        """Take the rows of expected requests from a step's hidden states."""
        if not self._wanted:
            return
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        batch = runner.input_batch
        for index, request_id in enumerate(batch.req_ids):
            prompt = runner.requests[request_id].prompt_token_ids
            wanted = self._wanted.get(tuple(prompt))
            if wanted is not None:
                rows = slice(*map(int, runner.query_start_loc.np[index : index + 2]))
                wanted.take(int(batch.num_computed_tokens_cpu[index]), hidden[rows])


def _windows_of(runner: Any) -> str | None:
    """Return the windows that the layers have, as in "64/256"; None without."""
    plan = getattr(runner.kv_cache_config, PLAN_ATTRIBUTE, None)
    if plan is None:
        return None
    return f"{plan.sizes.sink_tokens}/{plan.sizes.recent_tokens}"


def _head_of(model: Any, parallel_config: Any) -> Head:
    """Return the model's way from hidden states to logits.

    Raises:
        WorkerError: It is split over ranks, quantized, or not found.

    """
    ranks = parallel_config.tensor_parallel_size
    if ranks > 1 or parallel_config.pipeline_parallel_size > 1:
        raise WorkerError(
            "scores need the whole model in one worker: tensor and pipeline parallel "
            f"size 1, not {ranks} and {parallel_config.pipeline_parallel_size}"
        )
    processor = getattr(model, "logits_processor", None)
    layer = getattr(model, "lm_head", None)
    if not hasattr(layer, "weight"):  # some models with tied weights have none
        layer = getattr(getattr(model, "model", None), "embed_tokens", None)
    size = getattr(processor, "org_vocab_size", 0)
    weight = getattr(layer, "weight", torch.empty(0, dtype=torch.uint8))
    if not size or not weight.is_floating_point() or len(weight) < size:
        raise WorkerError(
            f"{type(model).__name__} has no logits_processor with an unquantized "
            "lm_head or embed_tokens: its logits cannot be computed in fp32"
        )
    bias = getattr(layer, "bias", None)
    return Head(
        weight.data[:size],
        None if bias is None else bias.data[:size],
        getattr(processor, "scale", 1.0),
        getattr(processor, "soft_cap", None),
    )
