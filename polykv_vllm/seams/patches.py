# SPDX-License-Identifier: Apache-2.0
"""Writes the seams as source patches, for people who build their own vLLM.

Each seam that changes vLLM says where and how (`Change.edits`); the patches are
differences between a vLLM and the same with the edits. So they cannot say anything else
than what the plugin does.
"""

import ast
import difflib
import textwrap
from pathlib import Path

from polykv_vllm.seams.seam import Seam
from polykv_vllm.seams.source import SourceTree

WIDTH = 78


def write_patches(seams: tuple[Seam, ...], tree: SourceTree, directory: Path) -> int:
    """Write the series.

    Args:
        seams: Those to write; the ones that change no file of vLLM are left out.
        tree: The unmodified vLLM.
        directory: Gets `NNNN-name.patch`; patches in it are replaced.

    Returns:
        The number of patches.

    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("*.patch"):
        path.unlink()
    number = 0
    for seam in seams:
        if edits := seam.change.edits(tree):
            number += 1
            path = directory / f"{number:04}-{seam.name}.patch"
            path.write_text(patch_of(seam, tree, edits))
            # Two seams may change one file: each patch comes after those before it.
            tree = tree.after(edits)
    return number


def patch_of(seam: Seam, tree: SourceTree, edits: dict[str, str]) -> str:
    """Return one patch, with a header that says what, why and until when."""
    facts = {
        "Why": seam.why,
        "Seam": f"polykv_vllm/seams/{seam.name}.py",
        "Target": seam.target,
        "Upstream": seam.upstream,
        "Remove when": seam.remove_when,
        "Needs": "the package polykv-vllm, which it calls"
        if "polykv_seam" in str(edits)
        else "nothing",
    }
    lines = [
        "\n".join(textwrap.wrap(f"{k}: {v}", WIDTH, subsequent_indent="  "))
        for k, v in facts.items()
    ]
    header = [f"polykv: {seam.name}", "", *lines, ""]
    licence = "SPDX-License-Identifier: Apache-2.0"
    made = "Made by `python -m polykv_vllm.seams --write-patches`; do not edit."
    parts = ["\n".join([licence, made, "", *header]), ""]
    for module, new in edits.items():
        name = tree.path(module).relative_to(tree.root).as_posix()
        difference = difflib.unified_diff(
            tree.read(module)[0].splitlines(keepends=True),
            new.splitlines(keepends=True),
            f"a/{name}",
            f"b/{name}",
        )
        parts.append("".join(difference))
    return "\n".join(parts[:1]) + "\n" + "".join(parts[1:])


def insert(text: str, additions: dict[int, str]) -> str:
    """Return a text with lines inserted before others, which count from 1."""
    lines = text.splitlines(keepends=True)
    for number in sorted(additions, reverse=True):
        lines.insert(number - 1, additions[number])
    return "".join(lines)


def import_of(name: str, text: str, parsed: ast.Module) -> dict[int, str]:
    """Return the addition that imports a name of `patched`, unless it is imported."""
    line = f"from polykv_vllm.seams.patched import {name}\n"
    return {} if line in text else {after_imports(parsed): line}


def after_imports(tree: ast.Module) -> int:
    """Return the line after a module's first block of imports."""
    last = 0
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            last = node.end_lineno or node.lineno
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            break
    return last + 1
