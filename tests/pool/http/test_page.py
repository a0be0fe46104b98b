# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser, through `polykv pool ui`, over a server that is made up.

`tests/e2e/test_pool_prefixes.py` opens it on vLLM.
"""

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from polykv_vllm.pool.http.local import PageServer
from polykv_vllm.pool.http.page import HEADERS, PAGE
from tests.browser import NARROW, WIDE, browser, take_picture

KEY = "secret"
MB = 1_000_000


def prefix(name: str, **changes: Any) -> dict[str, Any]:
    found = {
        "name": name,
        "state": "pinned",
        "public": False,
        "reason": "",
        "tokens": 3072,
        "pinned_tokens": 3072,
        "physical_bytes": 25 * MB,
        "logical_bytes": 71 * MB,
        "readers": 1,
        "hits": 12,
        "age_s": 240.0,
        "ttl_s": None,
        "expires_in_s": None,
        "tiers": ["memory", "disk"],
    }
    return found | changes


OUTLINE = {"name": "handbook", "state": "pinned", "public": True, "tokens": 2048}
LISTED = {
    "prefixes": [
        prefix("support-agent", readers=15, hits=4211, logical_bytes=1061 * MB),
        prefix(
            "handbook",
            public=True,
            tokens=2048,
            pinned_tokens=2048,
            physical_bytes=16.7 * MB,
            logical_bytes=755 * MB,
            readers=16,
            hits=9000,
        ),
        prefix(
            "support-agent.refunds",
            tokens=4096,
            pinned_tokens=4096,
            physical_bytes=33 * MB,
            logical_bytes=94 * MB,
            ttl_s=3600.0,
            expires_in_s=3242.5,
        ),
        prefix(
            "code-review",
            state="partial",
            pinned_tokens=1024,
            physical_bytes=8.5 * MB,
            ttl_s=600.0,
            expires_in_s=42.0,
            tiers=["disk"],
        ),
        prefix(
            "<script>document.title='taken'</script>",
            state="unpinned",
            reason="the prefix cache was reset <b>now</b>",
            pinned_tokens=0,
            physical_bytes=0,
            readers=0,
            tiers=[],
        ),
        prefix("code-explain", public=True),
    ],
    "tree": [
        {"tokens": 2048, "parent": None, "prefix": 1},
        {"tokens": 3072, "parent": 0, "prefix": 0},
        {"tokens": 4096, "parent": 1, "prefix": 2},
        {"tokens": 512, "parent": None, "prefix": None},
        {"tokens": 3072, "parent": 3, "prefix": 3},
        {"tokens": 3072, "parent": 3, "prefix": 5},
        {"tokens": 640, "parent": None, "prefix": 4},
    ],
    "cache": {
        "capacity_bytes": 268 * MB,
        "pin_cap_bytes": 134 * MB,
        "pinned_bytes": 100 * MB,
        "total_pinned_bytes": 118 * MB,
        "used_share": 0.7312,
    },
}
SALTED = {
    "prefixes": [prefix("mine"), OUTLINE],
    "tree": [
        {"tokens": 2048, "parent": None, "prefix": 1},
        {"tokens": 3072, "parent": 0, "prefix": 0},
    ],
    "cache": {
        "capacity_bytes": 268 * MB,
        "pin_cap_bytes": 134 * MB,
        "pinned_bytes": 17 * MB,
    },
}
EMPTY = {"prefixes": [], "tree": [], "cache": LISTED["cache"]}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        status, body = server.status, server.body
        if self.headers["Authorization"] != f"Bearer {KEY}":
            status, body = 401, {"error": "Unauthorized"}
        elif self.path != "/v1/polykv/prefixes":
            status, body = 404, {"detail": "Not Found"}
        elif self.headers["X-Cache-Salt"] is not None:
            server.salts.append(self.headers["X-Cache-Salt"])
            body = SALTED
        self.send_response(status)
        if status == 302:
            self.send_header("Location", f"http://127.0.0.1:{server.server_port}/steal")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


class Upstream(ThreadingHTTPServer):
    """Answers as vLLM does, with what it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.body, self.salts = 200, LISTED, []  # type: ignore[var-annotated]
        self.url = f"http://127.0.0.1:{self.server_port}"


def serve(server: ThreadingHTTPServer) -> None:
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        serve(server)
        yield server
        server.shutdown()


@pytest.fixture
def local(upstream: Upstream) -> Iterator[PageServer]:
    with PageServer(upstream.url, KEY, None) as server:
        serve(server)
        yield server
        server.shutdown()


def get(url: str, **headers: str) -> tuple[int, bytes, Any]:
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, reply.read(), reply.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def test_the_page_has_a_policy_that_lets_nothing_else_in() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert len(re.findall("(script|style)-src 'sha256-[^']{44}'", policy)) == 2
    assert "unsafe" not in policy
    text = PAGE.decode()
    assert not re.search(r"https?://|src=|@import|innerHTML|style=", text)


def test_the_key_is_sent_to_the_server_and_not_to_the_browser(
    local: PageServer,
) -> None:
    status, page, headers = get(local.url)
    assert (status, page) == (200, PAGE)
    assert headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in headers
    status, found, headers = get(local.url.replace("/ui", "/prefixes"))
    assert (status, json.loads(found)) == (200, LISTED)
    assert KEY not in str(headers)


@pytest.mark.parametrize(
    "path", ["/", "/ui", "/prefixes", "/x/ui", "/x/prefixes", "//ui", "/%C3%A9/ui"]
)
def test_without_the_word_of_the_address_nothing_is_read(
    local: PageServer, path: str
) -> None:
    status, body, _ = get(f"http://127.0.0.1:{local.server_port}{path}")
    assert status == 404
    assert b"polykv pool ui" in body


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1"])
def test_another_name_for_this_machine_is_refused(local: PageServer, host: str) -> None:
    """A page of a foreign site whose name now resolves to 127.0.0.1."""
    given = host.format(port=local.server_port)
    assert get(local.url, Host=given)[0] == 421
    assert get(local.url, Host=f"localhost:{local.server_port}")[0] == 200


def test_only_the_list_is_forwarded_and_no_redirect_followed(
    local: PageServer, upstream: Upstream
) -> None:
    base = local.url.removesuffix("ui")
    assert get(base + "prefixes/a/pin")[0] == 200  # the list again: what follows is cut
    assert get(base + "explain")[0] == 404
    request = urllib.request.Request(base + "prefixes", b"{}", method="POST")
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=20)
    assert error.value.code == 501
    upstream.status = 302
    assert get(base + "prefixes")[0] == 302


def test_a_server_that_is_gone_is_told(upstream: Upstream) -> None:
    with PageServer("http://127.0.0.1:9", KEY, None) as server:
        serve(server)
        status, body, _ = get(server.url.replace("/ui", "/prefixes"))
        server.shutdown()
    assert status == 502
    assert (
        "127.0.0.1:9/v1/polykv/prefixes does not answer"
        in json.loads(body)["error"]["message"]
    )


def names(page: Any) -> list[str]:
    return list(page.locator("tbody tr:visible .name").all_inner_texts())


@pytest.mark.slow
def test_the_page_in_a_browser(local: PageServer, upstream: Upstream) -> None:
    with browser() as chromium:
        page = chromium.new_page(viewport=WIDE)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda message: (
                problems.append(message.text) if "Content" in message.text else None
            ),
        )
        page.goto(local.url)
        page.wait_for_selector("tbody tr")
        script = "<script>document.title='taken'</script>"
        assert names(page) == [
            "handbook",
            "support-agent",
            "support-agent.refunds",
            script,
            "512 tokens in common",
            "code-explain",
            "code-review",
        ]
        assert page.title() == "Prefixes · polykv"  # text, not a script
        assert page.locator("tbody script, tbody b").count() == 0
        assert "54 min of 60 min" in page.inner_text("tbody")
        assert "88 % of the 134 MB" in page.inner_text("#figures")
        assert "73 %" in page.inner_text("#figures")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for name, size in (("wide", WIDE), ("narrow", NARROW)):
                page.set_viewport_size(size)
                take_picture(page, f"{scheme}-{name}")
                width = page.evaluate("document.documentElement.scrollWidth")
                assert width <= size["width"], (scheme, name)
        page.set_viewport_size(WIDE)
        look_at_keys(page)
        look_at_salts(page, upstream)
        look_at_changes(page, upstream)
        assert not problems


def look_at_keys(page: Any) -> None:
    """Close and open a branch with the keyboard; the list is drawn anew meanwhile."""
    page.locator("#salt").focus()
    for _ in range(3):  # Show, Pause, the first branch
        page.keyboard.press("Tab")
    focused = "document.activeElement.getAttribute('aria-label')"
    assert page.evaluate(focused) == "what lies below handbook"
    page.keyboard.press("Enter")
    assert "support-agent" not in names(page)
    before = page.inner_text("#when")
    page.wait_for_function("text => when.textContent !== text", arg=before)
    assert page.evaluate(focused) == "what lies below handbook"
    assert "support-agent" not in names(page)
    page.keyboard.press("Space")
    assert "support-agent.refunds" in names(page)


def look_at_salts(page: Any, upstream: Upstream) -> None:
    page.fill("#salt", "tenant")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=mine")
    assert names(page) == ["handbook", "mine"]
    assert "Pinned by this salt" in page.inner_text("#figures")
    assert "Cache in use" not in page.inner_text("#figures")
    page.reload()
    page.wait_for_selector("text=mine")
    assert set(upstream.salts) == {"tenant"}
    page.fill("#salt", "é—")
    page.keyboard.press("Enter")
    page.wait_for_selector("#error:visible")
    assert "ASCII" in page.inner_text("#error")
    assert names(page) == []  # not the ones of another salt
    page.fill("#salt", "")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=code-review")
    assert page.locator("#error").is_hidden()


def look_at_changes(page: Any, upstream: Upstream) -> None:
    upstream.body = EMPTY
    page.wait_for_selector("text=No prefixes yet")
    upstream.body = LISTED
    page.wait_for_selector("text=code-review")
    upstream.status, upstream.body = 503, {"error": {"message": "asleep"}}
    page.wait_for_selector("text=asleep")
    assert "code-review" in names(page)
    assert "What is shown is of" in page.inner_text("#error")
    take_picture(page, "error")
    upstream.status, upstream.body = 200, LISTED
    page.wait_for_selector("#error", state="hidden")


@pytest.mark.slow
def test_a_wrong_key_is_told(upstream: Upstream) -> None:
    with PageServer(upstream.url, "wrong", None) as server, browser() as chromium:
        serve(server)
        page = chromium.new_page()
        page.goto(server.url)
        page.wait_for_selector("text=The server wants its API key")
        server.shutdown()
        server.server_close()
        page.wait_for_selector("text=The server does not answer")
