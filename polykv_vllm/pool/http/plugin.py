# SPDX-License-Identifier: Apache-2.0
"""The endpoint plugin: loaded by vLLM when `VLLM_PLUGINS` names `polykv`."""

import asyncio
from argparse import Namespace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse

from polykv_vllm.config import parse_options
from polykv_vllm.pool.http import ROOT, SALT_HEADER
from polykv_vllm.pool.http.body import LimitedBodyRoute
from polykv_vllm.pool.http.page import HEADERS, PAGE
from polykv_vllm.pool.http.service import PrefixService
from polykv_vllm.pool.http.spec import PrefixSpec, PromptSpec, read_prefix_file
from polykv_vllm.pool.pins import PinError

_STATE = "polykv_prefixes"

router = APIRouter(prefix=ROOT, route_class=LimitedBodyRoute)


def _service(request: Request) -> PrefixService:
    service: PrefixService = getattr(request.app.state, _STATE)
    return service


def _salt(request: Request) -> str | None:
    """Return the salt of the requests that it is about; None: those without one.

    Raises:
        PinError: It is not clear whose prefixes are meant.

    """
    given = request.headers.getlist(SALT_HEADER)
    if not given:
        return None
    if len(given) > 1:  # a client's own beside one that a gateway has added
        raise PinError(f"{SALT_HEADER} is there {len(given)} times; send one", 400)
    if not given[0] or not (given[0].isascii() and given[0].isprintable()):
        raise PinError(
            f"{SALT_HEADER} must be printable ASCII, and not empty; without the header "
            "it is about requests without a cache_salt",
            400,
        )
    return given[0]


Service = Annotated[PrefixService, Depends(_service)]
Salt = Annotated[str | None, Depends(_salt)]


@router.get("/ui")
async def show_page() -> HTMLResponse:
    """Return the page that shows the prefixes; it has no data of its own."""
    return HTMLResponse(PAGE, headers=HEADERS)


@router.get("/prefixes")
async def list_prefixes(service: Service, salt: Salt = None) -> dict[str, Any]:
    """Describe the caller's prefixes."""
    return await service.describe_all(salt)


@router.post("/prefixes")
async def warm_prefix(
    spec: PrefixSpec, service: Service, salt: Salt = None
) -> dict[str, Any]:
    """Compute a prefix and pin it."""
    return await service.warm(salt, spec)


@router.delete("/prefixes/{name}")
async def remove_prefix(
    name: str, service: Service, salt: Salt = None
) -> dict[str, Any]:
    """Unpin a prefix and forget its name."""
    return await service.remove(salt, name)


@router.post("/prefixes/{name}/pin")
async def pin_prefix(name: str, service: Service, salt: Salt = None) -> dict[str, Any]:
    """Pin a known prefix again, computing what is missing."""
    return await service.pin(salt, name)


@router.post("/prefixes/{name}/unpin")
async def unpin_prefix(
    name: str, service: Service, salt: Salt = None
) -> dict[str, Any]:
    """Unpin a prefix; its name stays."""
    return await service.unpin(salt, name)


@router.post("/explain")
async def explain(
    prompt: PromptSpec, service: Service, salt: Salt = None
) -> dict[str, Any]:
    """Say what of a prompt is found, and where it leaves the caller's prefixes."""
    return await service.explain(salt, prompt)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PinError)
    # A prompt may have had what is no text, and be quoted: lone surrogates.
    message = str(error).encode(errors="replace").decode()
    content = {"error": {"message": message, "code": error.status}}
    return JSONResponse(content, status_code=error.status)


class PolyKVEndpoints:
    """What vLLM asks for when it makes its application."""

    name = "polykv"
    required_tasks: tuple[Any, ...] | None = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        app.include_router(router)
        app.add_exception_handler(PinError, _refuse)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Connect the routes with the engine, and start on known prefixes."""
        config = engine_client.vllm_config
        service = PrefixService(
            engine_client, state.serving_tokenization, config.model_config.max_model_len
        )
        setattr(state, _STATE, service)
        options = parse_options(config.additional_config).pool
        prefixes = read_prefix_file(options.prefixes) if options.prefixes else []
        if prefixes or options.path:
            # Kept: the loop itself holds tasks by weak references only.
            state.polykv_warming = asyncio.create_task(service.start(prefixes))


def endpoints() -> PolyKVEndpoints:
    """Entry point of the group `vllm.endpoint_plugins`."""
    return PolyKVEndpoints()
