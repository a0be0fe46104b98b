# SPDX-License-Identifier: Apache-2.0
"""Adds our names to the values that `--kv-cache-dtype` accepts.

vLLM keeps them in a closed `Literal`. The command line takes its choices from the
dataclass field's type, pydantic validates with a schema built from it, other modules
imported the `Literal` by value, and pydantic inlines the schema of one config class
into those that contain it: all of these are brought up to date.
"""

import ast
import dataclasses
import sys
import typing
from dataclasses import dataclass
from typing import Any, Literal

from polykv_vllm.formats import CACHE_DTYPES
from polykv_vllm.seams import probe, source
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
_TABLE = ("vllm.utils.torch_utils", "STR_DTYPE_TO_TORCH_DTYPE")
_added: set[str] = set()  # by this process


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

    def is_present(self) -> bool:
        """Whether it has them without having been given them."""
        return self.is_installed() and not _added

    def edits(self, tree: source.SourceTree) -> dict[str, str]:
        """Add our names to the Literal and to the table of torch dtypes."""
        from polykv_vllm.seams.patches import insert

        edited = {}
        values = "".join(f'    "{name}",\n' for name in self.names)
        entries = "".join(f'    "{name}": torch.uint8,\n' for name in self.names)
        for (module, name), lines in (((_MODULE, _NAME), values), (_TABLE, entries)):
            text, parsed = tree.read(module)
            edited[module] = insert(text, {_value(parsed, name).end_lineno or 1: lines})
        return edited

    def fingerprint_in(self, tree: source.SourceTree) -> str:
        """Describe where the Literal is used, from the source."""
        literal = _value(tree.read(_MODULE)[1], _NAME)
        if not ast.unparse(literal).startswith("Literal['auto'"):
            raise LookupError(f"{_MODULE}.{_NAME} is not the expected Literal")
        found = []
        for module, cls, name in _FIELDS:
            _, definition = tree.find(f"{module}:{cls}")
            (hint,) = [
                ast.unparse(node.annotation)
                for node in definition.body
                if isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and node.target.id == name
            ] or [f"no field {name}"]
            kinds = {_NAME: "", f"{_NAME} | None": "|None"}
            if hint not in kinds:
                raise LookupError(f"{module}.{cls}.{name} has the type {hint}")
            found.append(f"{cls}.{name}{kinds[hint]}")
        return " ".join(found)

    def install(self) -> None:
        """Add our names, once."""
        import torch

        if not self.is_installed():
            values = typing.get_args(self._literal())
            _added.update(self.names)
            self._rebind((*values, *self.names))
            self._dtype_table().update(dict.fromkeys(self.names, torch.uint8))

    def uninstall(self) -> None:
        """Take our names away."""
        if self.is_installed() and not self.is_present():
            _added.clear()
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


def _value(module: ast.Module, name: str) -> ast.expr:
    """Return what a module's global is assigned."""
    for node in module.body:
        if isinstance(node, ast.AnnAssign):
            targets: list[ast.expr] = [node.target]
        elif isinstance(node, ast.Assign):
            targets = node.targets
        else:
            continue
        if node.value is not None and name in map(ast.unparse, targets):
            return node.value
    raise LookupError(f"{name} is not assigned")


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
