# SPDX-License-Identifier: Apache-2.0
"""A process of its own for the Triton kernels under the interpreter, in the engine.

Whether Triton interprets is settled when a kernel is defined. Takes a directory and
writes result.json there: by instruction set, the kernels of the layers and the tokens.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

NEW_TOKENS = 4
PREFIX_TOKENS = 70
OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 16 << 20,
}


def generate(model: Path, isa: str | None) -> dict[str, Any]:
    """Return what greedy requests with a common prefix get, and which kernels ran."""
    from polykv_vllm import ops
    from polykv_vllm.ops.dispatch import ISA_VARIABLE
    from tests.e2e.family_worker import one_process_engine
    from tests.e2e.harness import Engine
    from tests.families import VOCABULARY

    if isa is not None:
        os.environ[ISA_VARIABLE] = isa
    ops.current_isa.cache_clear()
    prefix = [(7 * i * i + i) % VOCABULARY for i in range(PREFIX_TOKENS)]
    prompts = [[*prefix, *range(5, 5 + n)] for n in (1, 3, 9)]
    with one_process_engine(Engine(model, "polykv", **OPTIONS)) as engine:
        # The first one computes the prefix in two chunks, the others find it.
        outputs = engine.generate(prompts[:1], max_tokens=NEW_TOKENS)
        outputs += engine.generate(prompts[1:], max_tokens=NEW_TOKENS)
        return {
            "isas": [layer["isa"] for layer in engine.call("polykv_layers")],
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached_tokens": [output.num_cached_tokens for output in outputs],
        }


def main(directory: Path) -> None:
    """Run the C++ kernels, then the Triton kernels, on one model."""
    from polykv_vllm.kernels.triton.interpret import speed_up_interpreter
    from tests.families import Family, save_family

    family = Family("llama", "LlamaForCausalLM", {"num_hidden_layers": 2})
    model = save_family(directory / "llama", family)
    found = {"cpp": generate(model, None)}
    speed_up_interpreter()
    found["triton"] = generate(model, "triton")
    (directory / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["TRITON_INTERPRET"] = "1"
    main(Path(sys.argv[1]))
