# SPDX-License-Identifier: Apache-2.0
"""docs/support.md, the table of families and `polykv check` say the same."""

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the families are transformers' configs")

from polykv_vllm.architectures import ARCHITECTURES
from polykv_vllm.architectures import REFUSED as REFUSED_ARCHITECTURES
from polykv_vllm.cli.check import CheckError, run_check
from tests.families import REFUSED, SERVED
from tests.support_document import architectures, document

ROOT = Path(__file__).parents[1]


def test_the_document_is_the_table() -> None:
    written = (ROOT / "docs" / "support.md").read_text()
    assert written == document(), "python -m tests.support_document > docs/support.md"


def test_every_served_architecture_was_tried() -> None:
    assert architectures(SERVED.values()) == set(ARCHITECTURES)
    assert not set(ARCHITECTURES) & set(REFUSED_ARCHITECTURES)


@pytest.mark.parametrize("name", SERVED)
def test_check_serves(name: str, tmp_path: Path) -> None:
    family = SERVED[name]
    family.config().save_pretrained(tmp_path)
    assert run_check(str(tmp_path), family.kv_cache_dtype).ok


@pytest.mark.parametrize("name", REFUSED)
def test_check_refuses(name: str, tmp_path: Path) -> None:
    family = REFUSED[name]
    family.config().save_pretrained(tmp_path)
    with pytest.raises(CheckError, match=re.escape(family.refused)):
        run_check(str(tmp_path), family.kv_cache_dtype)


def test_the_readme_names_what_is_served() -> None:
    readme = (ROOT / "README.md").read_text()
    (row,) = re.findall(r"^\| models \| (.*) \|$", readme, flags=re.M)
    names = {re.sub(r" \(.*\)", "", label) for label in ARCHITECTURES.values()}
    assert [name for name in sorted(names) if name not in row] == []
