# SPDX-License-Identifier: Apache-2.0
"""Reads what a seam replaces from source files, without importing them.

For a vLLM that is not installed: the same fingerprints as `probe` makes from the
imported one.
"""

import ast
import hashlib
import io
import textwrap
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from polykv_vllm.seams.probe import LAYOUT_TOKENS

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True)
class SourceTree:
    """A directory that contains the package `vllm`, or that of another package.

    Attributes:
        root: The directory.
        changed: Modules with another text than their file's.

    """

    root: Path
    changed: Mapping[str, str] = field(default_factory=dict)

    def after(self, edits: Mapping[str, str]) -> "SourceTree":
        """Return the tree with the text of some modules changed."""
        return replace(self, changed={**self.changed, **edits})

    def path(self, module: str) -> Path:
        """Return the file of a module.

        Raises:
            FileNotFoundError: There is none.

        """
        stem = self.root.joinpath(*module.split("."))
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return path
        raise FileNotFoundError(f"no module {module} in {self.root}")

    def read(self, module: str) -> tuple[str, ast.Module]:
        """Return a module's text and its syntax tree."""
        text = self.changed.get(module)
        if text is None:
            text = self.path(module).read_text()
        return text, ast.parse(text)

    def find(self, target: str) -> tuple[str, Definition]:
        """Find a definition, through an import by value if need be.

        Args:
            target: "module:qualified.name".

        Returns:
            The text of the file that defines it, and the definition.

        Raises:
            FileNotFoundError: The module is gone.
            LookupError: The module has no such name.

        """
        module, _, qualname = target.partition(":")
        text, tree = self.read(module)
        body = tree.body
        found: Definition | None = None
        for name in qualname.split("."):
            found = _definition(body, name)
            if found is None and body is tree.body:
                origin = imported_from(tree, name)
                if origin is not None:
                    return self.find(f"{origin}:{qualname}")
            if found is None:
                raise LookupError(f"{target} does not exist")
            body = found.body
        assert found is not None
        return text, found


def _definition(body: list[ast.stmt], name: str) -> Definition | None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    matching = [n for n in body if isinstance(n, kinds) and n.name == name]
    return matching[-1] if matching else None


def imported_from(tree: ast.Module, name: str) -> str | None:
    """Return the module that a name is imported from, None if it is not."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return node.module
    return None


def fingerprint(text: str, definition: Definition) -> str:
    """Hash a definition's tokens, as `probe.fingerprint` does."""
    first = min([definition, *definition.decorator_list], key=lambda n: n.lineno)
    lines = text.splitlines(keepends=True)[first.lineno - 1 : definition.end_lineno]
    source = textwrap.dedent("".join(lines))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    words = (token.string for token in tokens if token.type not in LAYOUT_TOKENS)
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def signature(definition: Definition) -> str:
    """Return the parameters with their defaults, as `probe.signature` does.

    Raises:
        LookupError: It is a class.

    """
    if isinstance(definition, ast.ClassDef):
        raise LookupError(f"{definition.name} is a class, not a function")
    arguments = definition.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    for extra in (arguments.vararg, arguments.kwarg):
        if extra is not None:
            extra.annotation = None
    return f"({ast.unparse(arguments)})"
