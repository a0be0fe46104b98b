# SPDX-License-Identifier: Apache-2.0
"""Refuses bodies that no prompt needs before they are in memory."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message

MAX_BODY_BYTES = 16 << 20
"""A million tokens are about five million letters."""

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class LimitedBodyRoute(APIRoute):
    """A route that reads at most `MAX_BODY_BYTES`, whatever is announced or not."""

    def get_route_handler(self) -> _Handler:
        """Return what answers a request."""
        handle = super().get_route_handler()

        async def handle_limited(request: Request) -> Response:
            announced = request.headers.get("content-length", "")
            if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
                raise _refusal()
            return await handle(_Limited(request.scope, request.receive))

        return handle_limited


class _Limited(Request):
    """A request whose body ends with an error when it is too long."""

    def __init__(self, scope: Any, receive: Any) -> None:
        super().__init__(scope, self._receive_limited)
        self._receive_all = receive
        self._num_bytes = 0

    async def _receive_limited(self) -> Message:
        message: Message = await self._receive_all()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > MAX_BODY_BYTES:
            raise _refusal()
        return message


def _refusal() -> HTTPException:
    # Of all exceptions FastAPI lets this one pass while it reads a body.
    return HTTPException(413, f"the body has more than {MAX_BODY_BYTES >> 20} MiB")
