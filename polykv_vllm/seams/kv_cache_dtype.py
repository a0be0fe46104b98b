# SPDX-License-Identifier: Apache-2.0
"""Adds our names to the values that `--kv-cache-dtype` accepts.

vLLM keeps them in a closed `Literal`. The command line takes its choices from the
dataclass field's type, pydantic validates with a schema built from it, other modules
imported the `Literal` by value, and pydantic inlines the schema of one config class
into those that contain it: all of these are brought up to date.
"""

import dataclasses
import sys
import typing
from dataclasses import dataclass
from typing import Any, Literal

from polykv_vllm.formats import CACHE_DTYPES
from polykv_vllm.seams import probe
from polykv_vllm.seams.seam import Seam

_MODULE = "vllm.config.cache"
_NAME = "CacheDType"
# (module, class, field) of each config that is typed with the Literal. The last one
# has no such field but contains the others, so its schema must be rebuilt.
_FIELDS = (
    ("vllm.config.cache", "CacheConfig", "cache_dtype"),
    ("vllm.config.speculative", "SpeculativeConfig", "kv_cache_dtype"),
)
_CONTAINER = "vllm.config.vllm:VllmConfig"


@dataclass(frozen=True)
class ExtendCacheDtype:
    """Extends the Literal, the annotated fields and the torch dtype table."""

    names: tuple[str, ...] = CACHE_DTYPES

    def fingerprint(self) -> str:
        """Describe where the Literal is used, not its values: those may grow."""
        literal = self._literal()
        if typing.get_origin(literal) is not Literal or "auto" not in literal.__args__:
            raise TypeError(f"{_MODULE}.{_NAME} is not the expected Literal: {literal}")
        found = []
        for module, cls, name in _FIELDS:
            hint = self._field(module, cls, name).type
            kind = "" if hint is literal else "|None"
            if hint is not literal and hint != literal | None:
                raise TypeError(f"{module}.{cls}.{name} has the type {hint}")
            found.append(f"{cls}.{name}{kind}")
        return " ".join(found)

    def is_installed(self) -> bool:
        """Whether the Literal has our names."""
        return set(self.names) <= set(typing.get_args(self._literal()))

    def install(self) -> None:
        """Add our names, once."""
        import torch

        if not self.is_installed():
            values = typing.get_args(self._literal())
            self._rebind((*values, *self.names))
            self._dtype_table().update(dict.fromkeys(self.names, torch.uint8))

    def uninstall(self) -> None:
        """Take our names away."""
        if self.is_installed():
            values = typing.get_args(self._literal())
            self._rebind(tuple(v for v in values if v not in self.names))
            for name in self.names:
                self._dtype_table().pop(name, None)

    def _rebind(self, values: tuple[str, ...]) -> None:
        from pydantic.dataclasses import rebuild_dataclass

        old, new = self._literal(), Literal[values]
        for module in probe.importers_by_value(_NAME, old):
            setattr(module, _NAME, new)
        for module_name, cls_name, name in _FIELDS:
            cls = probe.resolve(f"{module_name}:{cls_name}")[2]
            field = self._field(module_name, cls_name, name)
            field.type = new if field.type is old else new | None
            cls.__annotations__[name] = field.type
            rebuild_dataclass(cls, force=True)
        rebuild_dataclass(probe.resolve(_CONTAINER)[2], force=True)
        _forget_command_line()

    @staticmethod
    def _literal() -> Any:
        return probe.resolve(f"{_MODULE}:{_NAME}")[2]

    @staticmethod
    def _field(module: str, cls: str, name: str) -> Any:
        fields = dataclasses.fields(probe.resolve(f"{module}:{cls}")[2])
        return next(field for field in fields if field.name == name)

    @staticmethod
    def _dtype_table() -> dict[str, Any]:
        from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

        return STR_DTYPE_TO_TORCH_DTYPE


def _forget_command_line() -> None:
    """Drop the argument tables that a parser built before us may have cached."""
    arg_utils = sys.modules.get("vllm.engine.arg_utils")
    compute = getattr(arg_utils, "_compute_kwargs", None)
    if compute is not None and hasattr(compute, "cache_clear"):
        compute.cache_clear()


def _is_obsolete() -> bool:
    literal = probe.resolve(f"{_MODULE}:{_NAME}")[2]
    return typing.get_origin(literal) is not Literal


SEAM = Seam(
    name="kv_cache_dtype",
    target=f"{_MODULE}:{_NAME}",
    why="--kv-cache-dtype is a closed list: our formats could not be asked for",
    upstream="vllm#51751 (RFC), vllm#52670",
    expected=("CacheConfig.cache_dtype SpeculativeConfig.kv_cache_dtype|None",),
    remove_when="vLLM lets plugins register KV cache dtypes",
    is_obsolete=_is_obsolete,
    change=ExtendCacheDtype(),
)
