# SPDX-License-Identifier: Apache-2.0
"""Shows our metrics on `/metrics` when there are several API servers.

For one API server `/metrics` serves Prometheus' default registry, which anyone can
register with. For several, the values of all of them are in files, and a registry with
nothing but the reader of these files is made anew for each scrape (by the route that
`prometheus_fastapi_instrumentator` adds, and by vLLM for the one behind it). What they
have in common is the reader's constructor, which is given the registry.
"""

from collections.abc import Callable
from typing import Any

from polykv_vllm.seams.seam import Seam, Wrap

_TARGET = "prometheus_client.multiprocess:MultiProcessCollector.__init__"


def _register_ours_too(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, registry: Any, path: Any = None) -> None:
        original(self, registry, path)
        from polykv_vllm.metrics import serving

        serving.add_to(registry)

    return __init__


SEAM = Seam(
    name="metrics_registry",
    target=_TARGET,
    why="the registries of several API servers take no collector from a plugin",
    upstream="none",
    expected=("(self, registry, path=None)",),
    remove_when="plugins can register collectors with the registry vLLM serves",
    is_obsolete=lambda: False,
    change=Wrap("metrics_registry", _TARGET, _register_ours_too, compare="signature"),
)
