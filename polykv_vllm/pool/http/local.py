# SPDX-License-Identifier: Apache-2.0
"""Serves the page of the prefixes to the browser of whoever has the server's key.

A browser that opens an address sends no key, and vLLM answers nothing below `/v1`
without one. So a small server on this machine sends the page, and forwards the one
route that the page asks, with the key. The browser never has the key.

Others on this machine must not read through it: every path begins with a random word
that only the printed address has. And a web page in the same browser must not either:
the name in `Host` has to be this server's (a foreign name that resolves to 127.0.0.1 is
refused), and no header lets another origin read an answer.
"""

import json
import secrets
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from polykv_vllm.pool.http import ROOT, SALT_HEADER
from polykv_vllm.pool.http.page import HEADERS, PAGE

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")
_TIMEOUT_S = 12.0  # less than what the page waits
_JSON = "application/json"


class _NoRedirect(HTTPRedirectHandler):
    """The key is for the server that was named, and for no other one."""

    def redirect_request(self, *args: object) -> None:
        return None


class PageServer(ThreadingHTTPServer):
    """Listens on this machine alone.

    Args:
        server_url: Of the vLLM server.
        api_key: Its key, if it has one.
        salt: `cache_salt` to ask for when the page names none.
        port: Where to listen; 0 takes a free one.

    Raises:
        OSError: The port is in use.

    """

    daemon_threads = True

    def __init__(
        self, server_url: str, api_key: str | None, salt: str | None, port: int = 0
    ) -> None:
        self._source = server_url.rstrip("/") + f"{ROOT}/prefixes"
        self._headers = {"Accept": _JSON}
        self._headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers |= {SALT_HEADER: salt} if salt else {}
        self._opener = build_opener(_NoRedirect())
        self._word = secrets.token_urlsafe(16)
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        """The address for the browser."""
        return f"http://{HOST}:{self.server_port}/{self._word}/ui"

    def answer(self, path: str, salt: str | None) -> tuple[int, bytes]:
        """Return the status and the body for a path; the page's is HTML, else JSON."""
        _, word, *rest = [*path.split("?")[0].split("/"), ""]
        if not secrets.compare_digest(word.encode(), self._word.encode()):
            return 404, _error("open the address that `polykv pool ui` has printed")
        if rest[0] == "ui":
            return 200, PAGE
        if rest[0] == "prefixes":
            return self._forward(salt)
        return 404, _error("there is nothing here")

    def is_named(self, host: str) -> bool:
        """Whether a `Host` header means this server."""
        return host in {f"{name}:{self.server_port}" for name in _NAMES}

    def _forward(self, salt: str | None) -> tuple[int, bytes]:
        headers = self._headers | ({SALT_HEADER: salt} if salt else {})
        try:
            request = Request(self._source, headers=headers)
            with self._opener.open(request, timeout=_TIMEOUT_S) as reply:
                return 200, reply.read()
        except HTTPError as error:
            return error.code, error.read()
        except (OSError, ValueError) as error:
            return 502, _error(f"{self._source} does not answer: {error}")


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "polykv"
    sys_version = ""

    def do_GET(self) -> None:
        if self.server.is_named(_one(self.headers, "Host") or ""):
            salt = _one(self.headers, SALT_HEADER)
            status, body = self.server.answer(self.path, salt)
        else:
            status, body = 421, _error("this server has another name")
        self._send(status, body)

    def _send(self, status: int, body: bytes) -> None:
        kind = "text/html; charset=utf-8" if body is PAGE else _JSON
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the address has a secret in it."""


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


def _one(headers: Message, name: str) -> str | None:
    """Return a header that is there once; None otherwise."""
    found = headers.get_all(name) or []
    return found[0] if len(found) == 1 else None
