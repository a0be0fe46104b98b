# SPDX-License-Identifier: Apache-2.0
"""Renders prefixes, has them computed, and asks the engine core to pin them."""

import itertools
import logging
from collections.abc import Awaitable, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.entrypoints.serve.tokenize.protocol import (
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.inputs import TokensPrompt

from polykv_vllm.pool.engine_cache import REQUEST_NAME
from polykv_vllm.pool.http.spec import FilePrefix, PrefixSpec, PromptSpec
from polykv_vllm.pool.pins import PinError
from polykv_vllm.seams.prefix_pool import METHOD

logger = logging.getLogger("vllm.polykv")

_ATTEMPTS = 3  # other requests may take a block between computing and pinning
_CONTEXT_TOKENS = 8


class PrefixService:
    """What the routes do. All of it is within one salt, that of the caller.

    Args:
        engine_client: vLLM's.
        tokenization: vLLM's: a prefix must have the tokens that requests have.
        max_model_len: Of the server.

    """

    def __init__(
        self, engine_client: Any, tokenization: ServingTokenization, max_model_len: int
    ) -> None:
        self._engine_client = engine_client
        self._tokenization = tokenization
        self._max_model_len = max_model_len
        self._numbers = itertools.count()

    async def warm(
        self,
        salt: str | None,
        spec: PrefixSpec,
        is_public: bool = False,
        is_from_file: bool = False,
    ) -> dict[str, Any]:
        """Compute a prefix and pin it.

        Args:
            salt: Of the requests that may use it.
            spec: What to compute.
            is_public: Whether requests of every salt may.
            is_from_file: Whether the next start will read of it again.

        Raises:
            PinError: It is malformed, too long, or may not be pinned.

        """
        token_ids = await self.tokens(spec)
        argument = {
            "name": spec.name,
            "token_ids": token_ids,
            "ttl_s": spec.ttl_s,
            "is_public": is_public,
            "is_from_file": is_from_file,
        }
        if not spec.pin:
            await self._compute(salt, token_ids)
            return {"name": spec.name, "state": "computed", "tokens": len(token_ids)}
        await self._ask("define", salt, **argument)
        return await self._compute_and_pin(salt, spec.name, token_ids)

    async def pin(self, salt: str | None, name: str) -> dict[str, Any]:
        """Pin a known prefix again, computing what is missing."""
        known = await self._ask("get", salt, name=name)
        return await self._compute_and_pin(salt, name, known["token_ids"])

    async def unpin(self, salt: str | None, name: str) -> dict[str, Any]:
        """Unpin a prefix."""
        return await self._ask("unpin", salt, name=name)

    async def remove(self, salt: str | None, name: str) -> dict[str, Any]:
        """Unpin a prefix and forget its name."""
        return await self._ask("remove", salt, name=name)

    async def describe_all(self, salt: str | None) -> dict[str, Any]:
        """Describe the caller's prefixes."""
        return await self._ask("list", salt)

    async def start(self, prefixes: Sequence[FilePrefix]) -> None:
        """Pin the prefixes of a file, then those that were pinned before a restart.

        What cannot be is logged.
        """
        for prefix in prefixes:
            spec = PrefixSpec(**prefix.model_dump(exclude={"cache_salt", "public"}))
            salt = prefix.cache_salt
            pinning = self.warm(salt, spec, prefix.public, is_from_file=True)
            await self._log(prefix.name, pinning)
        try:
            restored = (await self._ask("restored", None))["keys"]
        except PinError as error:
            logger.error("Pool: %s", error)
            return
        for salt, name in restored:
            await self._log(name, self.pin(salt, name))

    async def _log(self, name: str, pinning: Awaitable[dict[str, Any]]) -> None:
        try:
            done = await pinning
        except (PinError, ValueError) as error:  # ours, and vLLM's of a prompt
            logger.error("Pool: prefix %s: %s", name, error)
            return
        logger.info(
            "Pool: prefix %s is %s (%d tokens)", name, done["state"], done["tokens"]
        )

    async def explain(self, salt: str | None, prompt: PromptSpec) -> dict[str, Any]:
        """Say what of a prompt is found, and where it leaves the caller's prefixes."""
        token_ids = await self.tokens(prompt)
        found = await self._ask("explain", salt, token_ids=token_ids)
        size = found["block_size"]
        for prefix in found["prefixes"]:
            common = prefix["common"]
            prefix["shared_tokens"] = common - common % size
            prefix["below_a_block_tokens"] = common % size
            prefix["diverges"] = self._divergence(token_ids, common, prefix["tokens"])
        found["prefixes"].sort(key=lambda prefix: -prefix["common"])
        return {"tokens": len(token_ids)} | found

    async def tokens(self, prompt: PromptSpec) -> list[int]:
        """Render a prompt as the server does for requests.

        Raises:
            PinError: The template refuses it, or it is too long.

        """
        request: Any
        try:
            if prompt.text is not None:
                request = TokenizeCompletionRequest(prompt=prompt.text)
            else:
                request = TokenizeChatRequest(
                    messages=prompt.messages,
                    tools=prompt.tools,
                    add_generation_prompt=False,
                )
            answer = await self._tokenization.create_tokenize(request, None)
        except Exception as error:  # whatever a chat template throws
            raise PinError(f"the prompt cannot be rendered: {error}", 400) from error
        if not hasattr(answer, "tokens"):
            raise PinError(f"the prompt cannot be rendered: {answer}", 400)
        if len(answer.tokens) >= self._max_model_len:
            raise PinError(
                f"{len(answer.tokens)} tokens are too many: max_model_len is "
                f"{self._max_model_len}, and a request needs one more at least",
                400,
            )
        return list(answer.tokens)

    async def _compute_and_pin(
        self, salt: str | None, name: str, token_ids: Sequence[int]
    ) -> dict[str, Any]:
        described: dict[str, Any] = {}
        for _ in range(_ATTEMPTS):
            await self._compute(salt, token_ids)
            described = await self._ask("pin", salt, name=name)
            if described["state"] == "pinned":
                break
        return described

    async def _compute(self, salt: str | None, token_ids: Sequence[int]) -> None:
        prompt = TokensPrompt(prompt_token_ids=list(token_ids))
        if salt is not None:
            prompt["cache_salt"] = salt
        request_id = f"{REQUEST_NAME}{next(self._numbers)}"
        sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        async for _ in self._engine_client.generate(prompt, sampling, request_id):
            pass

    async def _ask(
        self, operation: str, salt: str | None, **argument: Any
    ) -> dict[str, Any]:
        core = self._engine_client.engine_core
        answer = await core.call_utility_async(
            METHOD, operation, {"salt": salt} | argument
        )
        if "error" in answer:
            raise PinError(answer["error"], answer["status"])
        return dict(answer)

    def _divergence(
        self, token_ids: Sequence[int], common: int, num_tokens: int
    ) -> dict[str, Any] | None:
        """Describe the first token that is not the prefix's; None: there is none."""
        if common == num_tokens or common == len(token_ids):
            return None
        tokenizer = self._engine_client.get_tokenizer()
        start = max(common - _CONTEXT_TOKENS, 0)
        return {
            "position": common,
            "token": tokenizer.decode([token_ids[common]]),
            "before": tokenizer.decode(list(token_ids[start:common])),
            "after": tokenizer.decode(
                list(token_ids[common : common + _CONTEXT_TOKENS])
            ),
        }
