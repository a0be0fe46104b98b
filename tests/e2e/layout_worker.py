# SPDX-License-Identifier: Apache-2.0
"""A process of its own for the cases of layout and accounting; see `family_worker`.

Takes a directory, prints one line of JSON at the end.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from tests.families import FULL_AND_SLIDING, VOCABULARY, Family, save_family

SMALL_CACHE_BYTES = 512 << 10
PADDED_CACHE_BYTES = 16 << 20
OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "block_size": 32,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
}


def start_error(model: Path, cache_dtype: str, **options: Any) -> str:
    """Return the error with which an engine does not start."""
    from tests.e2e.family_worker import one_process_engine
    from tests.e2e.harness import Engine

    try:
        engine = Engine(model, cache_dtype, **OPTIONS | options)
    except ValueError as error:
        from vllm.distributed import (
            destroy_distributed_environment,
            destroy_model_parallel,
        )

        destroy_model_parallel()
        destroy_distributed_environment()
        return str(error)
    with one_process_engine(engine):
        return ""


def named_maximum(error: str) -> int:
    """Return the longest model length that an error names as possible."""
    found = re.search(r"maximum model length is (\d+)", error)
    assert found, error
    return int(found[1])


def capacity(directory: Path) -> dict[str, Any]:
    """Ask for more tokens than fit, then for as many, and use them all."""
    from tests.e2e.family_worker import one_process_engine
    from tests.e2e.harness import Engine

    model = save_family(directory / "llama", Family("llama", "LlamaForCausalLM"))
    small: dict[str, Any] = {"kv_cache_memory_bytes": SMALL_CACHE_BYTES}
    error = start_error(model, "polykv", max_model_len=2048, **small)
    longest = named_maximum(error)
    stock = named_maximum(start_error(model, "auto", max_model_len=2048, **small))
    beyond = start_error(model, "polykv", max_model_len=longest + 1, **small)
    small["max_model_len"] = longest
    with one_process_engine(Engine(model, "polykv", **OPTIONS | small)) as engine:
        prompts = [
            [(i * (seed + 3)) % VOCABULARY for i in range(longest - 9)]
            for seed in range(3)
        ]
        outputs = engine.generate(prompts, max_tokens=9, ignore_eos=True)
        lengths = [
            len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs
        ]
        preemptions = engine.counter("vllm:num_preemptions")
    return {
        "error": error,
        "longest": longest,
        "stock_longest": stock,
        "beyond": beyond,
        "lengths": lengths,
        "preemptions": preemptions,
    }


def padded_pages(directory: Path) -> dict[str, Any]:
    """Keep the one full-attention layer of a model with windows uncompressed."""
    from tests.e2e.family_worker import one_process_engine
    from tests.e2e.harness import Engine

    family = Family("gemma3_text", "Gemma3ForCausalLM", FULL_AND_SLIDING)
    model = save_family(directory / "gemma", family)
    options = {
        "kv_cache_memory_bytes": PADDED_CACHE_BYTES,
        "kv_cache_dtype_skip_layers": ["2"],
        "max_model_len": 1024,
    }
    with one_process_engine(Engine(model, "polykv", **OPTIONS | options)) as engine:
        prompt = [(7 * i * i + i) % VOCABULARY for i in range(300)]
        miss = engine.score(prompt)
        hit = engine.score(prompt, read_cache=True)
        return {
            "storages": engine.call("polykv_cache_storages"),
            "shapes": engine.call("polykv_cache_shapes"),
            "layers": engine.call("polykv_attention_layers"),
            "num_blocks": engine.cache_config.num_gpu_blocks,
            "cached_tokens": hit.num_cached_tokens,
            "hit_difference": hit.max_difference(miss),
        }


def main(directory: Path) -> None:
    """Run both cases."""
    result = {"capacity": capacity(directory), "padded": padded_pages(directory)}
    (directory / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    main(Path(sys.argv[1]))
