# SPDX-License-Identifier: Apache-2.0
"""Finds what a seam replaces and tells whether it is still the same."""

import hashlib
import importlib
import inspect
import io
import sys
import textwrap
import tokenize
from types import ModuleType
from typing import Any

LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def resolve(target: str) -> tuple[Any, str, Any]:
    """Find a target.

    Args:
        target: "module:qualified.name".

    Returns:
        The owner (module or class), the attribute's name, and the attribute as the
        owner's `__dict__` holds it (a classmethod stays wrapped).

    Raises:
        ImportError: The module is gone.
        AttributeError: The module has no such name.

    """
    module_name, _, qualname = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = qualname.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    if name not in vars(owner):
        raise AttributeError(f"{target} does not exist")
    return owner, name, vars(owner)[name]


def function_of(attribute: Any) -> Any:
    """Return the plain function behind a classmethod or staticmethod."""
    return getattr(attribute, "__func__", attribute)


def fingerprint(attribute: Any) -> str:
    """Hash a function's tokens, signature included, comments and layout left out.

    Raises:
        OSError: Python cannot find its source.

    """
    source = inspect.getsource(function_of(attribute))
    tokens = tokenize.generate_tokens(io.StringIO(textwrap.dedent(source)).readline)
    words = (token.string for token in tokens if token.type not in LAYOUT_TOKENS)
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def signature(function: Any) -> str:
    """Return a function's parameters with their defaults, annotations left out."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters))


def importers_by_value(name: str, value: Any) -> list[ModuleType]:
    """Return the loaded modules whose global `name` is this very object.

    `from module import name` copies the reference: such modules keep the old value
    when only the defining module is changed.
    """
    return [
        module
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and vars(module).get(name) is value
    ]
