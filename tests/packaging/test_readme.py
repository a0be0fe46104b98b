# SPDX-License-Identifier: Apache-2.0
"""The README's figures and links are the project's."""

import re
from pathlib import Path

from polykv_vllm.cli.info import SHOWN_HEAD_DIMS
from polykv_vllm.formats import ALIASES, FORMATS, SUPPORTED_HEAD_DIMS
from polykv_vllm.models import MODELS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_formats_table() -> None:
    rows = re.findall(r"^\| (`polykv.*) \|$", README, flags=re.M)
    cells = [row.split(" | ") for row in rows]
    shown = {re.findall(r"`([^`]+)`", row[0])[-1]: row for row in cells}
    assert shown.keys() == FORMATS.keys()
    for name, row in shown.items():
        spec = FORMATS[name]
        assert row[1] == f"{spec.key_bits} bit"
        assert row[2].startswith(f"{spec.value_bits} bit")
        assert ("rotated" in row[2]) == (spec.value_rotation != "none")
        assert row[3:] == [
            f"{spec.slot_bytes(d)} ({spec.compression_ratio(d):.2f}x)"
            for d in SHOWN_HEAD_DIMS
        ]
    for alias, name in ALIASES.items():
        assert f"`{alias}` = `{name}`" in README


def test_names_every_head_size() -> None:
    assert f"| head sizes | {', '.join(map(str, SUPPORTED_HEAD_DIMS))} |" in README


def test_names_every_catalogue_model() -> None:
    assert all(f"`{name}`" in README for name in MODELS)


def test_links_and_files_exist() -> None:
    linked = re.findall(r"\]\((?!http|#)([^)#]+)\)", README)
    named = re.findall(r"(?:configs|packaging)/[\w./-]+\w", README)
    assert linked and named
    for path in (*linked, *named):
        assert (ROOT / path).exists(), path
