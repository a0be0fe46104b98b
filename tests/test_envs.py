# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from polykv_vllm import envs


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"POLYKV_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ({"POLYKV_CACHE": "~/models"}, "/home/user/models"),
        ({"POLYKV_CACHE": "", "XDG_CACHE_HOME": "/c"}, "/c/polykv"),
        ({}, "/home/user/.cache/polykv"),
    ],
)
def test_cache_dir(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("POLYKV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/user")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert envs.cache_dir() == Path(expected)
