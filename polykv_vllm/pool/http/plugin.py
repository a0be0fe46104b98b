# SPDX-License-Identifier: Apache-2.0
"""The endpoint plugin: loaded by vLLM when `VLLM_PLUGINS` names `polykv`."""

import asyncio
from argparse import Namespace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Request
from fastapi.responses import JSONResponse

from polykv_vllm.config import parse_options
from polykv_vllm.pool.http.service import PrefixService
from polykv_vllm.pool.http.spec import PrefixSpec, PromptSpec, read_prefix_file
from polykv_vllm.pool.pins import PinError

ROOT = "/v1/polykv"
_STATE = "polykv_prefixes"

router = APIRouter(prefix=ROOT)


def _service(request: Request) -> PrefixService:
    service: PrefixService = getattr(request.app.state, _STATE)
    return service


Service = Annotated[PrefixService, Depends(_service)]
Salt = Annotated[
    str | None,
    Header(
        alias="X-Cache-Salt",
        min_length=1,
        description="the cache_salt of the requests that the prefix is for; without "
        "it, those that have none",
    ),
]


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
    content = {"error": {"message": str(error), "code": error.status}}
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
        """Connect the routes with the engine, and start on the file of prefixes."""
        config = engine_client.vllm_config
        service = PrefixService(
            engine_client, state.serving_tokenization, config.model_config.max_model_len
        )
        setattr(state, _STATE, service)
        path = parse_options(config.additional_config).pool.prefixes
        if path is not None:
            # Kept: the loop itself holds tasks by weak references only.
            state.polykv_warming = asyncio.create_task(
                service.warm_all(read_prefix_file(path))
            )


def endpoints() -> PolyKVEndpoints:
    """Entry point of the group `vllm.endpoint_plugins`."""
    return PolyKVEndpoints()
