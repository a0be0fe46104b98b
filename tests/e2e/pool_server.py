# SPDX-License-Identifier: Apache-2.0
"""A server with a key and a pool, and what its clients ask."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polykv_vllm.server import VllmServer

KEY = "secret"
BLOCK = 32
SYSTEM = "You are a helpful assistant. " * 20  # a token for each letter
MESSAGES = [{"role": "system", "content": SYSTEM}]
NUM_TOKENS = len("<s>[system]") - 2 + len(SYSTEM)
CACHE_BYTES = 512 << 10
"""About 60 blocks of 32 tokens: 3 layers, 1 KV head, 92 bytes."""


def start(directory: Path, log: str) -> VllmServer:
    prompts, pool = directory / "prompts.yaml", directory / "pool"
    options = {"pool": {"prefixes": str(prompts), "path": str(pool)}}
    arguments = [
        *(str(directory / "model"), "--enforce-eager", "--kv-cache-dtype", "polykv"),
        *("--kv-cache-memory-bytes", str(CACHE_BYTES), "--max-model-len", "800"),
        *("--block-size", str(BLOCK), "--served-model-name", "tiny"),
        *("--api-key", KEY, "--dtype", "float32", "--enable-prompt-tokens-details"),
        *("--additional-config", json.dumps({"polykv": options})),
    ]
    environment = {"VLLM_PLUGINS": "polykv", "VLLM_SERVER_DEV_MODE": "1"}
    return VllmServer(arguments, directory / log, environment)


def call(
    server: VllmServer,
    method: str,
    path: str,
    body: Any = None,
    salt: str | None = None,
    key: str | None = KEY,
) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    headers |= {"X-Cache-Salt": salt} if salt else {}
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(server.base_url + path, data, headers)
    request.method = method
    try:
        with urllib.request.urlopen(request, timeout=240) as reply:
            text = reply.read()
            is_json = reply.headers.get_content_type() == "application/json"
            return reply.status, json.loads(text) if text and is_json else text
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def prefixes(server: VllmServer, salt: str | None = None) -> dict[str, Any]:
    status, found = call(server, "GET", "/v1/polykv/prefixes", salt=salt)
    assert status == 200
    return {prefix["name"]: prefix for prefix in found["prefixes"]}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def warm(server: VllmServer, name: str, salt: str | None = None, **body: Any) -> Any:
    given = {"name": name} | (body or {"messages": MESSAGES})
    return call(server, "POST", "/v1/polykv/prefixes", given, salt)


def chat(server: VllmServer, question: str, salt: str | None = None) -> int:
    """Ask; return how many tokens were cached."""
    body = {
        "model": "tiny",
        "messages": [*MESSAGES, {"role": "user", "content": question}],
        "max_tokens": 2,
    }
    body |= {"cache_salt": salt} if salt else {}
    status, reply = call(server, "POST", "/v1/chat/completions", body)
    assert status == 200, reply
    details = reply["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens", 0))


def flood(server: VllmServer, seed: int = 0) -> None:
    """Send unique prompts of ten times the cache."""
    num_tokens = 0
    number = seed
    while num_tokens < 10 * 60 * BLOCK:
        prompts = [[(number + i) * 7 % 250 + 1] * 700 for i in range(8)]
        for i, prompt in enumerate(prompts):
            prompt[:4] = [1 + (number + i) % 250, 1 + (number + i) // 250, seed + 1, 9]
        number += len(prompts)
        body = {"model": "tiny", "prompt": prompts, "max_tokens": 1}
        status, reply = call(server, "POST", "/v1/completions", body)
        assert status == 200, reply
        num_tokens += 700 * len(prompts)


def complete(server: VllmServer, prompt: str, salt: str) -> int:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "cache_salt": salt}
    status, reply = call(server, "POST", "/v1/completions", body)
    assert status == 200, reply
    details = reply["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens", 0))


def pool_metric(metrics: str, name: str) -> float:
    (line,) = (
        line
        for line in metrics.splitlines()
        if line.startswith(f"vllm:polykv_pool_{name}{{")
    )
    return float(line.rsplit(" ", 1)[1])
