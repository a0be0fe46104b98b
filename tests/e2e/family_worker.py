# SPDX-License-Identifier: Apache-2.0
"""A process of its own that tries small models, one engine after the other.

An engine starts here in two seconds: its worker is this process, vLLM is imported once
and nothing is compiled. Takes a directory and names of `SERVED`; writes NAME.json.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 300
CHUNK_TOKENS = 288
NEW_TOKENS = 3


def try_family(name: str, directory: Path) -> dict[str, Any]:
    """Run the model with vLLM's own cache, then with ours; return what was seen."""
    from tests.e2e.harness import Engine
    from tests.families import SERVED, VOCABULARY, save_family

    family = SERVED[name]
    model = save_family(directory / name, family)
    prompt = [(7 * i * i + i) % VOCABULARY for i in range(PROMPT_TOKENS)]
    options = {
        "skip_tokenizer_init": True,
        "dtype": family.dtype,
        "block_size": 32,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 64 << 20,
        **family.options,
    }
    with one_process_engine(Engine(model, "auto", **options)) as engine:
        stock = engine.score(prompt)
        found = {"stock_capacity_tokens": engine.capacity_tokens()}
    with one_process_engine(Engine(model, family.kv_cache_dtype, **options)) as engine:
        first = engine.score(prompt)
        found |= {
            "layers": engine.call("polykv_layers"),
            "block_size": engine.cache_config.block_size,
            "num_blocks": engine.cache_config.num_gpu_blocks,
            "capacity_tokens": engine.capacity_tokens(),
            "replay_difference": engine.replay_difference(prompt, NEW_TOKENS),
        }
        miss = engine.score(prompt)
        hit = engine.score(prompt, read_cache=True)
        projections = engine.call("polykv_key_projections")
    return found | {
        "model": str(model),
        "projections": projections,
        "first_difference": miss.max_difference(first),
        "cached_tokens": hit.num_cached_tokens,
        "hit_difference": hit.max_difference(miss),
        "stock_difference": miss.mean_difference(stock),
    }


class one_process_engine:
    """Context manager that also forgets the groups of the worker in this process."""

    def __init__(self, engine: Any):
        self.engine = engine

    def __enter__(self) -> Any:
        return self.engine

    def __exit__(self, *exc: object) -> None:
        from vllm.distributed import (
            destroy_distributed_environment,
            destroy_model_parallel,
        )

        self.engine.stop()
        destroy_model_parallel()
        destroy_distributed_environment()


def main(directory: Path, names: list[str]) -> None:
    """Try each model; what goes wrong with one is its result."""
    for name in names:
        try:
            result = try_family(name, directory)
        except Exception:
            result = {"error": traceback.format_exc()}
        path = directory / f"{name}.json"
        path.with_suffix(".part").write_text(json.dumps(result))
        path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    main(Path(sys.argv[1]), sys.argv[2:])
