# SPDX-License-Identifier: Apache-2.0
"""Prefixes over HTTP, on a server with an API key: pinned, capped, apart, lost."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest

from polykv_vllm.server import VllmServer
from tests.evaluate.byte_tokenizer import byte_tokenizer
from tests.random_models import save_model

KEY = "secret"
BLOCK = 32
SYSTEM = "You are a helpful assistant. " * 20  # a token for each letter
MESSAGES = [{"role": "system", "content": SYSTEM}]
NUM_TOKENS = len("<s>[system]") - 2 + len(SYSTEM)
PUBLIC = "Who reads this shares it, and says the rest alone. " * 2
CACHE_BYTES = 512 << 10
"""About 60 blocks of 32 tokens: 3 layers, 1 KV head, 92 bytes."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    if not list(entry_points(group="vllm.endpoint_plugins", name="polykv")):
        pytest.skip("the installed package is older than its routes: make setup")
    directory = tmp_path_factory.mktemp("server")
    model = directory / "model"
    save_model(model, "llama", {"hidden_size": 192, "num_attention_heads": 3})
    byte_tokenizer(chat=True).save_pretrained(model)
    prompts = directory / "prompts.yaml"
    prompts.write_text(
        f"prefixes:\n- {{name: from-file, text: '{'one two three ' * 5}'}}\n"
        f"- {{name: everyone, text: '{PUBLIC}', public: true}}\n"
    )
    options = {"pool": {"prefixes": str(prompts), "path": str(directory / "pool")}}
    arguments = [
        *(str(model), "--enforce-eager", "--kv-cache-dtype", "polykv"),
        *("--kv-cache-memory-bytes", str(CACHE_BYTES), "--max-model-len", "800"),
        *("--block-size", str(BLOCK), "--served-model-name", "tiny"),
        *("--api-key", KEY, "--dtype", "float32", "--enable-prompt-tokens-details"),
        *("--additional-config", json.dumps({"polykv": options})),
    ]
    environment = {"VLLM_PLUGINS": "polykv", "VLLM_SERVER_DEV_MODE": "1"}
    with VllmServer(arguments, directory / "log", environment) as server:
        server.wait_until_healthy()
        yield server


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
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.base_url + path, data, headers)
    request.method = method
    try:
        with urllib.request.urlopen(request, timeout=240) as reply:
            text = reply.read()
            return reply.status, json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def prefixes(server: VllmServer, salt: str | None = None) -> dict[str, Any]:
    status, found = call(server, "GET", "/v1/polykv/prefixes", salt=salt)
    assert status == 200
    return {prefix["name"]: prefix for prefix in found["prefixes"]}


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


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/polykv/prefixes"),
        ("POST", "/v1/polykv/prefixes"),
        ("DELETE", "/v1/polykv/prefixes/from-file"),
        ("POST", "/v1/polykv/prefixes/from-file/pin"),
        ("POST", "/v1/polykv/prefixes/from-file/unpin"),
        ("POST", "/v1/polykv/explain"),
    ],
)
def test_nothing_answers_without_the_key(
    server: VllmServer, method: str, path: str
) -> None:
    for key in (None, "wrong"):
        body = {"name": "x", "messages": MESSAGES}
        assert call(server, method, path, body, key=key)[0] == 401


def test_every_route_is_below_the_guarded_path() -> None:
    from polykv_vllm.pool.http.plugin import router

    assert router.routes
    assert all(route.path.startswith("/v1/polykv/") for route in router.routes)  # type: ignore[attr-defined]


def test_the_file_is_pinned_at_start(server: VllmServer) -> None:
    import time

    deadline = time.monotonic() + 60
    while "everyone" not in prefixes(server):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    found = prefixes(server)["from-file"]
    assert (found["state"], found["pinned_tokens"]) == ("pinned", 64)


def test_a_pinned_prefix_outlives_ten_caches_of_other_traffic(
    server: VllmServer,
) -> None:
    status, done = warm(server, "agents")
    assert status == 200, done
    assert done["state"] == "pinned"
    assert done["tokens"] == NUM_TOKENS
    assert done["pinned_tokens"] == NUM_TOKENS // BLOCK * BLOCK
    assert done["physical_bytes"] == done["pinned_tokens"] * 3 * 92
    assert chat(server, "hello") >= done["pinned_tokens"]
    flood(server)
    assert chat(server, "what now?") == done["pinned_tokens"]
    found = prefixes(server)["agents"]
    assert found["hits"] == 2  # the two questions, not what computed it
    assert found["tiers"] == ["memory", "disk"]


def test_another_salt_sees_and_shares_nothing(server: VllmServer) -> None:
    """CASE 29."""
    assert list(prefixes(server, "tenant")) == ["everyone"]
    assert chat(server, "hello again", "tenant") == 0
    status, _ = call(server, "DELETE", "/v1/polykv/prefixes/agents", salt="tenant")
    assert status == 404
    status, found = call(
        server, "POST", "/v1/polykv/explain", {"messages": MESSAGES}, "other"
    )
    assert (status, found["hit_tokens"]) == (200, 0)
    assert [prefix["name"] for prefix in found["prefixes"]] == ["everyone"]


def test_a_prefix_for_a_salt(server: VllmServer) -> None:
    status, done = warm(server, "short", "tenant", text="x" * 64)
    assert (status, done["state"]) == (200, "pinned")
    assert sorted(prefixes(server, "tenant")) == ["everyone", "short"]
    assert "short" not in prefixes(server)
    path = "/v1/polykv/prefixes/short"
    assert call(server, "DELETE", path, salt="tenant")[0] == 200
    assert list(prefixes(server, "tenant")) == ["everyone"]


def complete(server: VllmServer, prompt: str, salt: str) -> int:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "cache_salt": salt}
    status, reply = call(server, "POST", "/v1/completions", body)
    assert status == 200, reply
    details = reply["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens", 0))


def test_a_public_prefix_is_shared_below_private_suffixes(server: VllmServer) -> None:
    """CASE 29: tenants share what an operator says they may, and nothing after it."""
    shared = (len(PUBLIC) + 1) // BLOCK * BLOCK
    prompt = PUBLIC + "and a question of this tenant's own" * 3
    assert complete(server, prompt, "a") == shared
    assert complete(server, prompt, "b") == shared
    assert complete(server, prompt, "b") > shared
    found = prefixes(server, "a")["everyone"]
    assert found.keys() == {"name", "state", "public", "tokens"}
    path = "/v1/polykv/prefixes/everyone"
    assert call(server, "DELETE", path, salt="a")[0] == 404


def test_explain_shows_where_a_prompt_leaves(server: VllmServer) -> None:
    """CASE 27: a date in the middle of the system prompt."""
    changed = SYSTEM[:100] + "Monday" + SYSTEM[106:]
    body = {"messages": [{"role": "system", "content": changed}]}
    status, found = call(server, "POST", "/v1/polykv/explain", body)
    assert status == 200, found
    first = found["prefixes"][0]
    assert first["name"] == "agents"
    start = len("<s>[system]") - 2 + 100
    assert first["common"] == start
    assert first["shared_tokens"] == start // BLOCK * BLOCK
    assert first["below_a_block_tokens"] == start % BLOCK
    assert first["diverges"]["token"] == "M"
    assert first["diverges"]["after"].startswith("Monday")
    assert found["hit_tokens"] == first["shared_tokens"]


def test_what_fills_no_block_is_told(server: VllmServer) -> None:
    """CASE 28."""
    status, message = warm(server, "tiny", text="short")
    assert status == 400
    assert "fill no block" in message
    status, found = call(server, "POST", "/v1/polykv/explain", {"text": "short"})
    assert (status, found["hit_tokens"]) == (200, 0)
    assert found["tokens"] < found["block_size"]


def test_pins_beyond_the_cap_are_refused_and_long_requests_still_run(
    server: VllmServer,
) -> None:
    status, message = warm(server, "large", text="y" * 700)
    assert status == 409
    assert "blocks" in message and "pool.pinned_share" in message
    assert "large" not in prefixes(server)
    body = {"model": "tiny", "prompt": [3] * 790, "max_tokens": 8}
    assert call(server, "POST", "/v1/completions", body)[0] == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"name": "a"}, 400),
        ({"name": "../a", "text": "x"}, 400),
        ({"name": "a", "text": "x", "messages": MESSAGES}, 400),
        ({"name": "a", "text": "x" * 900}, 400),
        ({"name": "a", "text": "x", "ttl_s": 0}, 400),
        ({"name": "a", "text": "x", "other": 1}, 400),
        ({"name": "a", "messages": [{"no": "role"}]}, 400),
    ],
)
def test_bad_input_is_refused(server: VllmServer, body: Any, status: int) -> None:
    answer = call(server, "POST", "/v1/polykv/prefixes", body)
    assert answer[0] == status, answer


def test_a_reset_unpins_first_and_pinning_again_brings_it_back(
    server: VllmServer,
) -> None:
    assert call(server, "POST", "/reset_prefix_cache")[0] == 200
    found = prefixes(server)["agents"]
    assert found["state"] == "unpinned"
    assert "reset" in found["reason"]
    path = "/v1/polykv/prefixes/agents"
    assert call(server, "POST", f"{path}/pin")[1]["state"] == "pinned"
    assert call(server, "POST", f"{path}/unpin")[1]["state"] == "unpinned"
    assert call(server, "POST", f"{path}/pin")[1]["state"] == "pinned"
    assert call(server, "POST", "/v1/polykv/prefixes/nobody/pin")[0] == 404
