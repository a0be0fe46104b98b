# SPDX-License-Identifier: Apache-2.0
"""What a seam is: one place where vLLM has no hook for what we need.

A seam says what it replaces and why, recognises the original by its fingerprint, and
says when it can be deleted. `Wrap` covers the common case, a function replaced by
one that calls the original; `AddMethod` gives a class one more method.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from polykv_vllm.seams import probe, source

MARKER = "__polykv_seam__"
IN_SOURCE = "__polykv_in_source__"


class SeamState(StrEnum):
    """Where a seam stands in this process."""

    INSTALLED = "installed"
    PRESENT = "present upstream"  # this vLLM was built with our patch
    READY = "ready"  # the target is the expected one
    CHANGED = "changed"  # the target is missing or another one
    OBSOLETE = "obsolete"  # vLLM has the hook now: delete the seam


class Change(Protocol):
    """How a seam finds, installs and removes itself; install is idempotent."""

    def fingerprint(self) -> str:
        """Describe the target as it was before this seam."""

    def is_installed(self) -> bool:
        """Whether the target carries this seam."""

    def is_present(self) -> bool:
        """Whether it carries it by its source, without `install`."""

    def edits(self, tree: source.SourceTree) -> dict[str, str]:
        """Return the modules of vLLM that the seam would change, with the new text."""

    def fingerprint_in(self, tree: source.SourceTree) -> str:
        """Describe the target as `fingerprint` does, without importing it.

        Raises:
            FileNotFoundError: The module, or the package, is not in the tree.
            LookupError: The target is not in the module.

        """

    def install(self) -> None:
        """Put the seam in place, once."""

    def uninstall(self) -> None:
        """Restore the original."""


@dataclass(frozen=True)
class Wrap:
    """Replaces a function by `make(original)`, which is to call the original.

    Attributes:
        name: The seam's name, left on the replacement as a mark.
        target: "module:qualified.name" of a function, method or classmethod.
        make: Builds the replacement.
        compare: What must be the same for the seam to hold: "source" where it relies
            on what the original does, "signature" where it only calls it.

    """

    name: str
    target: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    compare: Literal["source", "signature"] = "source"

    def fingerprint(self) -> str:
        """Describe the original."""
        _, _, attribute = probe.resolve(self.target)
        function = probe.function_of(attribute)
        if getattr(function, MARKER, None) == self.name:
            function = function.__wrapped__
        if self.compare == "signature":
            return probe.signature(function)
        return probe.fingerprint(function)

    def is_installed(self) -> bool:
        """Whether the target carries the mark."""
        _, _, attribute = probe.resolve(self.target)
        return getattr(probe.function_of(attribute), MARKER, None) == self.name

    def is_present(self) -> bool:
        """Whether the mark was made by `patched.polykv_seam`."""
        _, _, attribute = probe.resolve(self.target)
        function = probe.function_of(attribute)
        return self.is_installed() and getattr(function, IN_SOURCE, False)

    def wrap(
        self, original: Callable[..., Any], in_source: bool = False
    ) -> Callable[..., Any]:
        """Return the marked replacement of a function."""
        replacement = functools.wraps(original)(self.make(original))
        setattr(replacement, MARKER, self.name)
        setattr(replacement, IN_SOURCE, in_source)
        return replacement

    def edits(self, tree: source.SourceTree) -> dict[str, str]:
        """Decorate the function, or wrap the imported name after the imports."""
        from polykv_vllm.seams.patches import after_imports, import_of, insert

        module, _, qualname = self.target.partition(":")
        if module.split(".")[0] != "vllm":
            return {}
        text, parsed = tree.read(module)
        decorator = f'polykv_seam("{self.name}")'
        additions = import_of("polykv_seam", text, parsed)
        if source.imported_from(parsed, qualname) is not None:
            last = after_imports(parsed)
            line = f"\n{qualname} = {decorator}({qualname})\n"
            additions[last] = additions.get(last, "") + line
        else:
            _, found = tree.find(self.target)
            additions[found.lineno] = f"{' ' * found.col_offset}@{decorator}\n"
        return {module: insert(text, additions)}

    def fingerprint_in(self, tree: source.SourceTree) -> str:
        """Describe the original from its source."""
        text, found = tree.find(self.target)
        if self.compare == "signature":
            return source.signature(found)
        return source.fingerprint(text, found)

    def install(self) -> None:
        """Replace the target, keeping its kind (classmethod or function)."""
        if self.is_installed():
            return
        owner, name, attribute = probe.resolve(self.target)
        original = probe.function_of(attribute)
        setattr(owner, name, self._like(attribute, self.wrap(original)))

    def uninstall(self) -> None:
        """Put the original back."""
        if not self.is_installed() or self.is_present():
            return
        owner, name, attribute = probe.resolve(self.target)
        original = probe.function_of(attribute).__wrapped__
        setattr(owner, name, self._like(attribute, original))

    @staticmethod
    def _like(attribute: Any, function: Callable[..., Any]) -> Any:
        is_method_kind = isinstance(attribute, (classmethod, staticmethod))
        return type(attribute)(function) if is_method_kind else function


@dataclass(frozen=True)
class AddMethod:
    """Gives a class a method.

    Attributes:
        name: The seam's name.
        target: "module:qualified.name" of a class.
        method: The name that it gets there.
        function: The method.

    """

    name: str
    target: str
    method: str
    function: Callable[..., Any]

    def fingerprint(self) -> str:
        """Say whether the name is free in a class without this seam."""
        found = getattr(probe.resolve(self.target)[2], self.method, self.function)
        return "free" if found is self.function else "taken"

    def is_installed(self) -> bool:
        """Whether the class has the method."""
        owner = probe.resolve(self.target)[2]
        return getattr(owner, self.method, None) is self.function

    def is_present(self) -> bool:
        """Whether `patched.polykv_seam` gave it to the class."""
        owner = probe.resolve(self.target)[2]
        return self.is_installed() and getattr(owner, self._mark, False)

    @property
    def _mark(self) -> str:
        return f"{IN_SOURCE}{self.name}"

    def wrap(self, owner: type, in_source: bool = False) -> type:
        """Return the class, with the method."""
        setattr(owner, self.method, self.function)
        setattr(owner, self._mark, in_source)
        return owner

    def edits(self, tree: source.SourceTree) -> dict[str, str]:
        """Decorate the class."""
        from polykv_vllm.seams.patches import import_of, insert

        module = self.target.partition(":")[0]
        text, parsed = tree.read(module)
        _, found = tree.find(self.target)
        additions = import_of("polykv_seam", text, parsed)
        indent = " " * found.col_offset
        additions[found.lineno] = f'{indent}@polykv_seam("{self.name}")\n'
        return {module: insert(text, additions)}

    def fingerprint_in(self, tree: source.SourceTree) -> str:
        """Describe the class from its source."""
        _, found = tree.find(self.target)
        names = {getattr(node, "name", None) for node in found.body}
        return "taken" if self.method in names else "free"

    def install(self) -> None:
        """Add the method."""
        if not self.is_installed():
            self.wrap(probe.resolve(self.target)[2])

    def uninstall(self) -> None:
        """Take it away."""
        if self.is_installed() and not self.is_present():
            owner = probe.resolve(self.target)[2]
            delattr(owner, self.method)
            delattr(owner, self._mark)


@dataclass(frozen=True)
class Seam:
    """The record of one seam.

    Attributes:
        name: Short, unique.
        target: "module:qualified.name" of what is replaced or extended.
        why: What does not work without it.
        upstream: The discussion that would make it unnecessary, or "none".
        expected: Fingerprints of the targets it was written for.
        remove_when: When to delete it, in words.
        is_obsolete: Tells from the installed vLLM whether that time has come.
        change: Installs and removes it.

    """

    name: str
    target: str
    why: str
    upstream: str
    expected: tuple[str, ...]
    remove_when: str
    is_obsolete: Callable[[], bool]
    change: Change = field(repr=False)

    def inspect(self) -> tuple[SeamState, str]:
        """Return the state and, unless all is well, the reason."""
        try:
            if self.is_obsolete():
                return SeamState.OBSOLETE, f"delete it: {self.remove_when}"
            if self.change.is_present():
                return SeamState.PRESENT, ""
            if self.change.is_installed():
                return SeamState.INSTALLED, ""
            found = self.change.fingerprint()
        except Exception as error:
            # Whatever a changed vLLM throws here means the same: not our target.
            return SeamState.CHANGED, f"{type(error).__name__}: {error}"
        if found not in self.expected:
            known = ", ".join(self.expected)
            return SeamState.CHANGED, f"fingerprint {found}, expected {known}"
        return SeamState.READY, ""
