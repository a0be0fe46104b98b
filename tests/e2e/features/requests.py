# SPDX-License-Identifier: Apache-2.0
"""What the engines are asked."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

from tests.e2e.features.models import ADAPTERS
from tests.e2e.features.session import BLOCK_SIZE, Sequence, Session

TEXT = [(7 * i * i + i) % 257 for i in range(900)]
OTHER = [(5 * i * i + 3 * i + 1) % 257 for i in range(900)]
LOOP = TEXT[:96] + TEXT[200:219] * 6  # repeats itself, so that drafts are proposed
PROMPTS = [TEXT[:100], OTHER[:130], LOOP, TEXT[:64] + OTHER[:9], TEXT[5:6]]
TOKENS = 24
CHUNKS = (16, 64, 512, None)
WHOLE = 4 * BLOCK_SIZE
REPEATED = (WHOLE, WHOLE + 1, 1)
"""Lengths of prompts that are sent twice."""
SCHEMA = {
    "type": "object",
    "properties": {
        "role": {"enum": ["reader", "writer"]},
        "calm": {"type": "boolean"},
        "level": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["role", "calm", "level"],
    "additionalProperties": False,
}
Result = dict[str, Any]


def judge_of(session: Session) -> str:
    """The engine that is the same without the feature."""
    if session.config.cache_config.cache_dtype == "auto":
        return "stock"
    return "windows" if "gemma" in session.config.model_config.model else "plain"


def texts(session: Session, models: Path) -> Result:
    """Complete each prompt alone, then all in one batch that finds them cached."""
    judge = judge_of(session)
    alone = [session.generate([p], judge, max_tokens=TOKENS)[0] for p in PROMPTS]
    together = session.generate(PROMPTS, judge, max_tokens=TOKENS)
    return {"alone": alone, "together": together}


def hits(session: Session) -> list[int]:
    """Tokens found in the cache by requests one after the other."""
    agents = [TEXT[:300] + [i] * (5 + 40 * i) for i in range(4)]
    whole = [TEXT[:WHOLE], TEXT[:WHOLE], TEXT[: WHOLE + 1], TEXT[:1]]
    prompts = [*agents, *whole, OTHER[: BLOCK_SIZE - 1]]
    return [
        session.outputs([prompt], max_tokens=2)[0].num_cached_tokens
        for prompt in prompts * 2
    ]


def plain(session: Session, models: Path) -> Result:
    result: Result = {"hits": hits(session)}
    result["reset"] = session.llm.reset_prefix_cache()
    return result | texts(session, models)


def drafts(session: Session, models: Path) -> Result:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    result = texts(session, models)
    return result | {n: session.counter(f"vllm:spec_decode_{n}") for n in names}


def adapters(session: Session, models: Path) -> Result:
    """Two adapters and the model itself: alone, again (a hit), the two in one batch."""
    from vllm.lora.request import LoRARequest

    loras = [
        LoRARequest(name, number, str(models / name))
        for number, name in enumerate(ADAPTERS, start=1)
    ]
    prompt = PROMPTS[0]
    result: Result = {"alone": [], "again": []}
    for lora, judge in zip([*loras, None], [*ADAPTERS, "base"], strict=True):
        for kind in ("alone", "again"):
            result[kind] += session.generate([prompt], judge, lora, max_tokens=24)
    outputs = session.outputs([prompt] * 2, lora=loras, max_tokens=24)
    pairs = zip(outputs, ADAPTERS, strict=True)
    return result | {"together": [session.sequence(*pair) for pair in pairs]}


def reloaded(session: Session, models: Path) -> Result:
    """Files of an adapter that become another's, at the same path under the same name.

    It is loaded again under a new id, then in place; in the end it is the first one
    again, and the cache in memory is empty.
    """
    from vllm.lora.request import LoRARequest

    north, south = ADAPTERS
    path = models / "reloaded"

    def ask(adapter: str, number: int, **options: Any) -> list[Sequence]:
        shutil.copytree(models / adapter, path, dirs_exist_ok=True)
        lora = LoRARequest("reloaded", number, str(path), **options)
        return session.generate([PROMPTS[0]], adapter, lora, max_tokens=24)

    result = {"first": ask(north, 1), "again": ask(north, 1)}
    session.llm.llm_engine.remove_lora(1)
    result["another"] = ask(south, 2)
    result["another again"] = ask(south, 2)
    result["in place"] = ask(north, 2, load_inplace=True)
    result["in place again"] = ask(north, 2)
    time.sleep(0.5)  # until it is written
    session.llm.reset_prefix_cache()
    return result | {"from disk": ask(north, 3)}


def kinds(session: Session, models: Path) -> Result:
    """Requests that ask for more than text."""
    return {
        "embeddings": embeddings(session, models),
        "repeated": repeated(session),
        "structured": structured(session),
        "beams": beams(session),
    }


def embeddings(session: Session, models: Path) -> list[Sequence]:
    """Send the rows of the embedding table instead of the token ids, twice."""
    from safetensors.torch import load_file

    weights = load_file(models / "llama" / "model.safetensors")
    prompt = PROMPTS[0]
    rows = {"prompt_embeds": weights["model.embed_tokens.weight"][prompt]}
    found = [*session.generate([rows]), *session.generate([rows])]
    for sequence in found:
        sequence.prompt = list(prompt)
    return found


def repeated(session: Session) -> Result:
    """Send a prompt twice, and a third time with its log-probabilities."""
    result: Result = {}
    for length in REPEATED:
        assert session.llm.reset_prefix_cache()
        prompt = TEXT[300 : 300 + length]
        twice = session.generate([prompt]) + session.generate([prompt])
        (scored,) = session.outputs([prompt], max_tokens=16, prompt_logprobs=3)
        entries = [
            sorted((e.rank, e.logprob, token) for token, e in entry.items())
            for entry in scored.prompt_logprobs[1:]
        ]
        third = session.sequence(scored)
        result[str(length)] = {"sequences": [*twice, third], "entries": entries}
    return result


def structured(session: Session) -> Result:
    """Ask for JSON of a schema, missed and hit.

    Nobody else can judge it: the mask is applied before log-probabilities are taken.
    """
    from vllm.sampling_params import StructuredOutputsParams

    schema = StructuredOutputsParams(json=json.dumps(SCHEMA))
    options = {"max_tokens": 80, "ignore_eos": False, "structured_outputs": schema}
    prompts = [TEXT[:50], OTHER[:70]]
    found = session.generate(prompts, **options) + session.generate(prompts, **options)
    # Not the outputs' text: vLLM has the bytes before it in it when they are no UTF-8.
    tokenizer = session.llm.get_tokenizer()
    return {
        "texts": [tokenizer.decode(s.tokens, skip_special_tokens=True) for s in found],
        "logprobs": [s.logprobs for s in found],
        "cached": [s.cached for s in found],
    }


def beams(session: Session) -> Result:
    """Search with three beams, and greedily."""
    from vllm.sampling_params import BeamSearchParams

    prompt = OTHER[:90]
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    (output,) = session.llm.beam_search([{"prompt_token_ids": prompt}], params)
    found = []
    for beam in output.sequences:
        tokens = list(beam.tokens[len(prompt) :])
        entries = zip(tokens, beam.logprobs, strict=True)
        logprobs = [float(entry[token].logprob) for token, entry in entries]
        found.append(Sequence(prompt, tokens, logprobs))
    return {
        "sequences": found,
        "sums": [beam.cum_logprob for beam in output.sequences],
        "greedy": session.generate([prompt], max_tokens=8)[0],
    }


def chunks(session: Session, models: Path) -> Result:
    """Compute a prompt in steps of several sizes; then what hits, what hits more."""
    result: Result = {}
    scheduler = session.core.scheduler
    largest = scheduler.max_num_scheduled_tokens
    for size in CHUNKS:
        scheduler.max_num_scheduled_tokens = size or largest
        assert session.llm.reset_prefix_cache()
        prompts = [TEXT[:700], TEXT[:700], TEXT[:256] + OTHER[:9], TEXT[:256] + OTHER]
        prompts[3] = prompts[3][:900]
        result[str(size)] = [session.generate([p], max_tokens=8)[0] for p in prompts]
    return result


def preemption(session: Session, models: Path) -> Result:
    prompts = [TEXT[40 * i : 40 * i + 70] for i in range(8)]
    found = session.generate(prompts, max_tokens=60)
    return {"texts": found, "preemptions": session.counter("vllm:num_preemptions")}


def longest(session: Session, models: Path) -> Result:
    """Requests of which each fills the whole pool, and one that is too long for it."""
    from vllm.exceptions import VLLMValidationError

    limit = session.config.model_config.max_model_len
    lengths = (limit - 1, limit - 2 * BLOCK_SIZE, limit - 40)
    prompts = [TEXT[i : i + length] for i, length in enumerate(lengths)]
    found = [session.generate([p], max_tokens=limit - len(p))[0] for p in prompts]
    together = session.generate(prompts, max_tokens=limit)
    try:
        session.generate([TEXT[:limit]])
        refusal = ""
    except VLLMValidationError as error:
        refusal = str(error)
    return {"alone": found, "together": together, "refusal": refusal}


def replayed(session: Session, models: Path) -> Result:
    """Compare our layers with the reference, on the bytes that both attend to."""
    call = session.llm.collective_rpc
    prompt = TEXT[:300]
    call("polykv_record")
    kernel = session.score(prompt)
    call("polykv_replay")
    reference = session.score(prompt)
    call("polykv_stop")
    pairs = zip(kernel, reference, strict=True)
    layers = call("polykv_attention_layers")[0]
    return {
        "replay": max(abs(a - b) for a, b in pairs),
        "layers": [layers[name] for name in sorted(layers)],
        "hits": hits(session),
    }


def switched_off(session: Session, models: Path) -> Result:
    """Ask for what the CPU platform does not have."""
    session.generate(PROMPTS)
    session.llm.sleep(level=1)
    session.llm.wake_up()
    return {
        "async": session.config.scheduler_config.async_scheduling,
        "texts": session.generate(PROMPTS),
    }
