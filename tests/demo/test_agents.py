# SPDX-License-Identifier: Apache-2.0
"""Requests of the agents, against a small server that speaks the OpenAI API."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from polykv_vllm.demo.agents import next_wave, open_conversations, run_wave
from polykv_vllm.demo.scenario import AgentScript, Scenario

SCENARIO = Scenario(
    "the handbook",
    (AgentScript("a", ("a1", "a2")), AgentScript("b", ("b1", "b2"))),
)


class FakeApi(BaseHTTPRequestHandler):
    """Answers each message with its text in capitals, in two chunks, and usage."""

    requests: list[dict[str, Any]]
    status = 200

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(request)
        self.send_response(self.status)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        text = request["messages"][-1]["content"].upper()
        for piece in (text[:1], text[1:]):
            self._send({"choices": [{"index": 0, "delta": {"content": piece}}]})
        usage = {"prompt_tokens": 100, "completion_tokens": 2, "total_tokens": 102}
        self._send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, fields: dict[str, Any]) -> None:
        head = {"id": "1", "object": "chat.completion.chunk", "created": 0}
        event = json.dumps(head | {"model": "m"} | fields)
        self.wfile.write(f"data: {event}\n\n".encode())

    def log_message(self, *arguments: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def api() -> Iterator[tuple[str, type[FakeApi]]]:
    handler = type("Handler", (FakeApi,), {"requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def test_two_waves_continue_each_agents_conversation(
    api: tuple[str, type[FakeApi]],
) -> None:
    url, handler = api
    agents = open_conversations(SCENARIO)
    for number in range(2):
        wave = next_wave(agents, number)
        run_wave(wave, agents, url, "m", max_tokens=7)
        assert [turn.answer for turn in wave.turns] == [
            f"A{number + 1}",
            f"B{number + 1}",
        ]
        assert all(turn.done and turn.first_token_s for turn in wave.turns)
        assert (wave.prompt_tokens, wave.output_tokens) == (200, 4)
        assert wave.tokens_per_s == pytest.approx(4 / wave.wall_s)
    last = sorted(handler.requests[2:], key=lambda request: str(request["messages"]))
    assert [[m["content"] for m in request["messages"]] for request in last] == [
        ["the handbook", "a1", "A1", "a2"],
        ["the handbook", "b1", "B1", "b2"],
    ]
    assert {(r["model"], r["max_tokens"], r["temperature"]) for r in last} == {
        ("m", 7, 0)
    }


def test_a_failing_server_is_not_hidden(api: tuple[str, type[FakeApi]]) -> None:
    url, handler = api
    handler.status = 500
    agents = open_conversations(SCENARIO)
    with pytest.raises(ExceptionGroup) as raised:
        run_wave(next_wave(agents, 0), agents, url, "m", max_tokens=7)
    assert len(handler.requests) <= len(agents), "a request was repeated"
    assert "500" in str(raised.value.exceptions[0])
