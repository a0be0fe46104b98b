# SPDX-License-Identifier: Apache-2.0
"""A real browser: Debian's chromium, or the one that CHROMIUM names, by Playwright."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WIDE, NARROW = {"width": 1600, "height": 900}, {"width": 360, "height": 780}


@contextmanager
def browser() -> Iterator[Any]:
    """Yield Playwright's browser; skips the test, and says why, where there is none."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: make setup"
    )
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser")
    program = next(filter(None, (shutil.which(name) for name in names if name)), None)
    if program is None:
        pytest.skip("there is no chromium (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        # Root, as in a container, has no sandbox to offer.
        arguments = ["--no-sandbox", "--disable-gpu"]
        chromium = playwright.chromium.launch(executable_path=program, args=arguments)
        yield chromium
        chromium.close()


def take_picture(page: Any, name: str) -> None:
    """Keep what a page looks like, if POLYKV_PICTURES names a folder."""
    if folder := os.environ.get("POLYKV_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
