# SPDX-License-Identifier: Apache-2.0
"""Two workers for one model, and two engines behind one server."""

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.server import VllmServer
from tests.e2e.conftest import TEXT
from tests.e2e.features.models import save_llama
from tests.e2e.features.session import BLOCK_SIZE, CACHE_DTYPE
from tests.e2e.harness import Engine

HEADS = {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896}
PROMPTS = [
    [(7 * i * i + k) % 257 for i in range(length)]
    for k, length in enumerate((150, 150, 40, 1))
]


@pytest.fixture
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("two workers need two CPUs")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cpus[0]}|{cpus[1]}")


def generated(outputs: list[Any]) -> list[tuple[list[int], list[float]]]:
    found = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        entries = zip(tokens, output.outputs[0].logprobs, strict=True)
        found.append((tokens, [entry[token].logprob for token, entry in entries]))
    return found


def mean_difference(logprobs: list[float], others: list[float]) -> float:
    pairs = zip(logprobs, others, strict=True)
    return sum(abs(a - b) for a, b in pairs) / len(logprobs)


def check_two_workers(model: Path, prompts: list[list[int]], tolerance: float) -> None:
    """Compare what two workers generate with what one says of the same tokens."""
    options = {"block_size": BLOCK_SIZE, "kv_cache_memory_bytes": 32 << 20}
    options |= {"dtype": "float32", "max_model_len": 512}
    sampling = {"max_tokens": 16, "logprobs": 0, "ignore_eos": True}
    with Engine(model, CACHE_DTYPE, tensor_parallel_size=2, **options) as engine:
        shapes = engine.llm.collective_rpc("polykv_cache_shapes")
        miss = generated(engine.generate(prompts, **sampling))
        outputs = engine.generate(prompts, **sampling)
        hits, again = [o.num_cached_tokens for o in outputs], generated(outputs)
    assert [{shape[1] for shape in rank.values()} for rank in shapes] == [{1}, {1}]
    assert hits == [(len(p) - 1) // BLOCK_SIZE * BLOCK_SIZE for p in prompts]
    with Engine(model, CACHE_DTYPE, **options) as engine:
        for prompt, *texts in zip(prompts, miss, again, strict=True):
            for tokens, logprobs in texts:
                scored = engine.score([*prompt, *tokens]).logprobs[-17:-1]
                assert mean_difference(logprobs, scored) <= tolerance


@pytest.mark.usefixtures("two_cpus")
def test_tensor_parallelism(tmp_path: Path) -> None:
    """14 query heads on 2 KV heads, one for each worker (as Qwen2.5-Coder-0.5B)."""
    save_llama(tmp_path, **HEADS)
    check_two_workers(tmp_path, PROMPTS, tolerance=0.005)


@pytest.mark.slow
@pytest.mark.usefixtures("two_cpus")
def test_tensor_parallelism_of_qwen2_5_coder() -> None:
    from polykv_vllm.models import built_model

    model = built_model("qwen2.5-coder-0.5b")
    if model is None:
        pytest.skip("not built: polykv model qwen2.5-coder-0.5b")
    # Two workers add their halves in another order, and after 24 layers of codes that
    # differ the results differ by the quantization error: about 0.1 nats a token.
    tokens = [200 + 13 * i for i in range(150)]
    check_two_workers(model, [tokens, tokens[:70]], tolerance=0.25)


def complete(server: VllmServer, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Complete all prompts with one request; vLLM spreads them over its engines."""
    body = {"model": "small", "prompt": prompts, "max_tokens": 12, "temperature": 0}
    body |= {"logprobs": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return list(json.load(reply)["choices"])


def test_data_parallelism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines with a cache each; their figures are told apart on /metrics."""
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    save_llama(tmp_path / "model")
    options = {
        "--served-model-name": "small",
        "--data-parallel-size": "2",
        "--api-server-count": "1",
        "--kv-cache-dtype": CACHE_DTYPE,
        "--kv-cache-memory-bytes": "16M",
        "--block-size": str(BLOCK_SIZE),
        "--max-model-len": "512",
        "--dtype": "float32",
    }
    words = [word for option in options.items() for word in option]
    prompts = [[byte + 1 for byte in TEXT[i : i + 90].encode()] for i in range(8)]
    arguments = [str(tmp_path / "model"), "--enforce-eager", *words]
    with VllmServer(arguments, tmp_path / "log") as server:
        server.wait_until_healthy()
        choices = complete(server, prompts)
        metrics = server.metrics().splitlines()
    for engine in ("0", "1"):
        steps = [
            float(line.split()[-1])
            for line in metrics
            if line.startswith("vllm:polykv_steps_total")
            and f'engine="{engine}"' in line
        ]
        assert sum(steps) >= 12, f"engine {engine} computed nothing"
    options = {"dtype": "float32", "max_model_len": 512, "block_size": BLOCK_SIZE}
    with Engine(tmp_path / "model", CACHE_DTYPE, **options) as engine:
        for prompt, choice in zip(prompts, choices, strict=True):
            tokens = choice["token_ids"]
            scored = engine.score([*prompt, *tokens]).logprobs[-13:-1]
            found = choice["logprobs"]["token_logprobs"]
            assert found == pytest.approx(scored, abs=0.02)
