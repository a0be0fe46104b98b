# SPDX-License-Identifier: Apache-2.0
"""Prefixes over HTTP, on a server with an API key: pinned, capped, apart, lost."""

import contextlib
import http.client
import os
import signal
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.pool.http.local import PageServer
from polykv_vllm.pool.http.page import PAGE
from polykv_vllm.process import group_members
from polykv_vllm.server import VllmServer
from tests.browser import WIDE, browser
from tests.e2e.pool_server import (
    BLOCK,
    KEY,
    MESSAGES,
    NUM_TOKENS,
    SYSTEM,
    call,
    chat,
    complete,
    flood,
    pool_metric,
    prefixes,
    start,
    wait_for,
    warm,
)
from tests.evaluate.byte_tokenizer import byte_tokenizer
from tests.random_models import save_model

# Several engines, or long prompts, on a slow and busy machine.
pytestmark = pytest.mark.timeout(1500)

PUBLIC = "Who reads this shares it, and says the rest alone. " * 2
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/secret"}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a file of prefixes; two servers have it, one after the other."""
    if not list(entry_points(group="vllm.endpoint_plugins", name="polykv")):
        pytest.skip("the installed package is older than its routes: make setup")
    directory = tmp_path_factory.mktemp("server")
    model = directory / "model"
    save_model(model, "llama", {"hidden_size": 192, "num_attention_heads": 3})
    byte_tokenizer(chat=True).save_pretrained(model)
    (directory / "prompts.yaml").write_text(
        f"prefixes:\n- {{name: from-file, text: '{'one two three ' * 5}'}}\n"
        f"- {{name: everyone, text: '{PUBLIC}', public: true}}\n"
    )
    return directory


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[VllmServer]:
    with start(directory, "log") as server:
        server.wait_until_healthy(timeout_s=550)
        yield server


def routes() -> list[tuple[str, str]]:
    """Return method and path of every route of ours, one for each name."""
    from polykv_vllm.pool.http.plugin import router

    found = [(m, r.path) for r in router.routes for m in r.methods]  # type: ignore[attr-defined]
    return sorted((m, path.format(name="from-file")) for m, path in found)


def test_nothing_answers_without_the_key(server: VllmServer) -> None:
    """CASE 29: vLLM guards what lies below /v1, the page included."""
    assert ("GET", "/v1/polykv/ui") in routes()
    for method, path in routes():
        assert path.startswith("/v1/polykv/")
        body = {"name": "x", "messages": MESSAGES}
        for key in (None, "wrong"):
            assert call(server, method, path, body, key=key)[0] == 401, (method, path)
            assert call(server, "HEAD", path, key=key)[0] == 401
        # vLLM asks no key for OPTIONS: it must tell nothing, not even what exists.
        for name in ("from-file", "nobody"):
            named = path.replace("from-file", name)
            assert call(server, "OPTIONS", named, key=None)[0] == 405


def test_the_file_is_pinned_at_start(server: VllmServer) -> None:
    wait_for(lambda: "everyone" in prefixes(server))
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
        ({"name": "a\n", "text": "x"}, 400),
        ({"name": "a", "text": "x" * 64, "ttl_s": 1e300}, 400),
        (b'{"name": "a", "text": "x", "ttl_s": Infinity}', 400),
        (b'{"name": "a", "text": "' + b"x" * 64 + b'", "ttl_s": NaN}', 400),
        (b'{"name": "a", "text": "\\ud800"}', 400),
        (b'{"name": "a", "messages": [{"role": "\\ud800", "content": "x"}]}', 400),
        (b'{"name": "a", "messages": ' + b"[" * 100_000, 400),
        ({"name": "a", "messages": [{"role": "user", "content": [IMAGE]}]}, 400),
    ],
)
def test_bad_input_is_refused(server: VllmServer, body: Any, status: int) -> None:
    answer = call(server, "POST", "/v1/polykv/prefixes", body)
    assert answer[0] == status, answer


@pytest.mark.parametrize("path", ["..%2F..%2Fetc", "%00", "a%2Fb", "é", "x" * 5000])
def test_a_name_in_the_path_is_only_a_name(server: VllmServer, path: str) -> None:
    named = urllib.parse.quote(path, safe="%")
    assert call(server, "DELETE", f"/v1/polykv/prefixes/{named}")[0] in (404, 405)


@pytest.mark.parametrize("salts", [[b""], [b"tenant", b"mine"], [b"\xc3\xa9"]])
def test_it_must_be_clear_whose_prefixes_are_meant(
    server: VllmServer, salts: list[bytes]
) -> None:
    """CASE 29: a client's own salt beside one that a gateway adds."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("GET", "/v1/polykv/prefixes")
    connection.putheader("Authorization", f"Bearer {KEY}")
    for salt in salts:
        connection.putheader("X-Cache-Salt", salt)
    connection.endheaders()
    reply = connection.getresponse()
    assert reply.status == 400
    assert b"X-Cache-Salt" in reply.read()
    connection.close()


@pytest.mark.parametrize("announced", [{}, {"Content-Length": str(40 << 20)}])
def test_a_body_that_no_prompt_needs_is_cut(
    server: VllmServer, announced: dict[str, str]
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    pieces = (b" " * (1 << 20) for _ in range(40))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.request("POST", "/v1/polykv/explain", pieces, headers | announced)
    assert connection.getresponse().status == 413
    connection.close()


def test_pins_are_on_metrics(server: VllmServer) -> None:
    found = call(server, "GET", "/v1/polykv/prefixes")[1]
    held = sum(p.get("physical_bytes", 0) for p in found["prefixes"])
    assert held > 0
    metrics = server.metrics()
    assert pool_metric(metrics, "pinned_bytes") == held
    assert pool_metric(metrics, "pinned_prefixes") == 3
    cap = pool_metric(metrics, "pin_cap_bytes")
    assert held < cap == found["cache"]["pin_cap_bytes"]


def test_prefixes_that_share_blocks_lie_below_each_other(server: VllmServer) -> None:
    longer = PUBLIC + "of a tenant " * 4
    assert warm(server, "below", "tenant", text=longer)[1]["state"] == "pinned"
    found = call(server, "GET", "/v1/polykv/prefixes", salt="tenant")[1]
    names = [prefix["name"] for prefix in found["prefixes"]]
    public, below = (names.index(name) for name in ("everyone", "below"))
    nodes = {node["prefix"]: node for node in found["tree"]}
    assert found["tree"][nodes[below]["parent"]] == nodes[public]
    assert nodes[public]["tokens"] == (len(PUBLIC) + 1) // BLOCK * BLOCK
    # CASE 29: nothing of what others pin, and how full the cache is with them.
    assert found["cache"].keys() == {"capacity_bytes", "pin_cap_bytes", "pinned_bytes"}
    assert found["cache"]["pinned_bytes"] == found["prefixes"][below]["physical_bytes"]
    assert call(server, "DELETE", "/v1/polykv/prefixes/below", salt="tenant")[0] == 200


def test_the_page_shows_them(server: VllmServer) -> None:
    """In a real browser, with the key kept from it (`polykv pool ui`)."""
    status, page = call(server, "GET", "/v1/polykv/ui")
    assert (status, page) == (200, PAGE)
    with PageServer(server.base_url, KEY, None) as local, browser() as chromium:
        threading.Thread(target=local.serve_forever, daemon=True).start()
        view = chromium.new_page(viewport=WIDE)
        view.goto(local.url)
        view.wait_for_selector("text=agents")
        names = view.locator("tbody .name").all_inner_texts()
        assert names == ["everyone", "agents", "from-file"]
        agents = view.locator("tr", has_text="agents").inner_text()
        assert f"{NUM_TOKENS // BLOCK * BLOCK}" in agents
        assert "memory, disk" in agents
        view.fill("#salt", "tenant")
        view.keyboard.press("Enter")
        view.wait_for_selector("text=Pinned by this salt")
        assert view.locator("tbody .name").all_inner_texts() == ["everyone"]
        local.shutdown()


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


KEPT = {
    "kept": {"text": "k" * 70, "ttl_s": 3600.0},
    "let-go": {"text": "l" * 40},
    "brief": {"text": "b" * 40, "ttl_s": 1.5},
}


@pytest.fixture(scope="module")
def restarted(server: VllmServer, directory: Path) -> Iterator[VllmServer]:
    """The next server over the same directory; the first one was killed with -9."""
    call(server, "DELETE", "/v1/polykv/prefixes/agents")
    for name, body in KEPT.items():
        assert warm(server, name, **body)[1]["state"] == "pinned"
    assert warm(server, "kept", "tenant", text="t" * 40)[1]["state"] == "pinned"
    assert call(server, "POST", "/v1/polykv/prefixes/let-go/unpin")[0] == 200
    assert warm(server, "removed", text="r" * 40)[0] == 200
    assert call(server, "DELETE", "/v1/polykv/prefixes/removed")[0] == 200
    # A name of the file at start, given to another text meanwhile.
    assert warm(server, "from-file", text="f" * 40)[1]["tokens"] == 41
    for process in group_members(server.process_group):
        os.kill(process, signal.SIGKILL)
    (names,) = (directory / "pool").glob("ranks/*/names")
    assert names.stat().st_mode & 0o077 == 0
    files = list(names.iterdir())
    assert len(files) == 5  # from-file, for now
    assert all(file.stat().st_mode & 0o177 == 0 for file in files)
    hostile = names / f"{'0' * 64}.json"
    hostile.write_text(files[0].read_text())
    hostile.chmod(0o600)
    with start(directory, "log-2") as again:
        again.wait_until_healthy(timeout_s=550)
        yield again


def test_names_survive_a_restart_and_pins_come_back(restarted: VllmServer) -> None:
    wait_for(lambda: prefixes(restarted).get("kept", {}).get("state") == "pinned")
    found = prefixes(restarted)
    assert sorted(found) == ["brief", "everyone", "from-file", "kept", "let-go"]
    kept = found["kept"]
    assert (kept["tokens"], kept["pinned_tokens"]) == (71, 64)
    assert kept["ttl_s"] == 3600.0 and 3500 < kept["expires_in_s"] <= 3600
    assert kept["age_s"] > 1  # since it was named, not since the restart
    assert (found["let-go"]["state"], found["let-go"]["reason"]) == (
        "unpinned",
        "unpinned on request",
    )
    assert found["brief"]["reason"] == "its time to live is over"
    assert found["from-file"]["tokens"] != 41  # the file's
    assert pool_metric(restarted.metrics(), "restored_total") >= 2  # not computed


def test_the_names_of_a_salt_are_still_its_own(restarted: VllmServer) -> None:
    """CASE 29."""
    wait_for(lambda: prefixes(restarted, "tenant")["kept"]["state"] == "pinned")
    assert prefixes(restarted, "tenant")["kept"]["tokens"] == 41
    assert sorted(prefixes(restarted, "other")) == ["everyone"]


def test_a_hostile_file_is_told_of_and_not_believed(
    restarted: VllmServer, directory: Path
) -> None:
    log = restarted.log_path.read_text()
    assert f"{'0' * 64}.json names no prefix: it has the name of another" in log
