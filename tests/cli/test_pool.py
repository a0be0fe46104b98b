# SPDX-License-Identifier: Apache-2.0
"""`polykv pool` without a server; `tests/e2e/test_pool_prefixes.py` has one."""

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polykv_vllm.cli import app
from polykv_vllm.cli.pool import explanation

runner = CliRunner()
NOBODY = ["--url", "http://127.0.0.1:9"]


def test_nobody_answers() -> None:
    result = runner.invoke(app, ["pool", "ls", *NOBODY])
    assert result.exit_code == 1
    assert "127.0.0.1:9 does not answer" in result.output


class _Server(BaseHTTPRequestHandler):
    """Up at the third question; has no prefixes."""

    num_asked = 0

    def do_GET(self) -> None:
        type(self).num_asked += 1
        self.send_response(200 if self.num_asked > 2 else 503)
        self.end_headers()
        self.wfile.write(b'{"prefixes": []}')


def test_a_server_that_starts_is_waited_for() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        result = runner.invoke(app, ["pool", "ls", "--url", url, "--wait", "60"])
        server.shutdown()
    assert result.exit_code == 0, result.output
    assert "no prefixes" in result.output
    assert _Server.num_asked == 4


def test_waiting_ends() -> None:
    start = time.monotonic()
    result = runner.invoke(app, ["pool", "ls", *NOBODY, "--wait", "0.6"])
    assert result.exit_code == 1
    assert 0.6 <= time.monotonic() - start < 30


def test_a_port_in_use_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = runner.invoke(app, ["pool", "ui", "--port", port])
    assert result.exit_code == 1
    assert f"port {port} cannot be had" in result.output


@pytest.mark.parametrize(
    "given", [[], ["--text", "a", "--system", "b"], ["--file", "/no/such/file"]]
)
def test_one_prompt_is_needed(given: list[str]) -> None:
    result = runner.invoke(app, ["pool", "warm", "x", *given, *NOBODY])
    assert result.exit_code in (1, 2)
    assert "--file" in result.output


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    file.write_text("[")
    result = runner.invoke(app, ["pool", "warm", "x", "--file", str(file), *NOBODY])
    assert result.exit_code == 1
    assert "messages.json" in result.output


def test_the_explanation_names_the_place() -> None:
    """CASES 27 and 28."""
    place = {"position": 41, "token": "M", "before": "Today is ", "after": "Monday"}
    found = {
        "tokens": 100,
        "hit_tokens": 32,
        "disk_tokens": 0,
        "block_size": 32,
        "prefixes": [
            {
                "name": "agents",
                "tokens": 90,
                "shared_tokens": 32,
                "below_a_block_tokens": 9,
                "diverges": place,
            }
        ],
    }
    text = "\n".join(explanation(found))
    assert "100 tokens: 32 are in memory and 0 more on disk" in text
    assert "agents: 32 of 90 tokens in whole blocks, and 9 below a block" in text
    assert "differs at token 41: 'M', in 'Today is ⟨here⟩Monday'" in text
    none = found | {"tokens": 9, "prefixes": []}
    assert "shorter prompt never hits" in "\n".join(explanation(none))
