# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from polykv_vllm.errors import OptionError
from polykv_vllm.pool.http.spec import read_prefix_file

GOOD = """
prefixes:
- name: agents
  ttl_s: 60
  messages:
  - {role: system, content: You are helpful.}
- {name: agents, text: hello, cache_salt: tenant}
- {name: everyone, text: hello, public: true}
"""


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.yaml"
    path.write_text(GOOD)
    first, second, third = read_prefix_file(str(path))
    assert (first.name, first.ttl_s, first.pin) == ("agents", 60, True)
    assert (second.cache_salt, third.public) == ("tenant", True)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("prefixes: [", "flow"),
        ("", "the file"),
        ("prefixes: {}", "list"),
        ("prefixes: [{name: a}]", "either text or messages"),
        ("prefixes: [{name: a, text: x, messages: [{}]}]", "either text or messages"),
        ("prefixes: [{name: a/b, text: x}]", "prefixes.0.name"),
        ("prefixes: [{name: a, text: x, ttl: 3}]", "prefixes.0.ttl"),
        ("prefixes: [{name: a, text: x}, {name: a, text: y}]", "named twice: a"),
        (
            "prefixes: [{name: a, text: x, public: true, cache_salt: s}]",
            "no cache_salt",
        ),
        ("prefixes: [{name: a, text: x, tools: []}]", "tools belong to messages"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: str, part: str) -> None:
    path = tmp_path / "prompts.yaml"
    path.write_text(content)
    with pytest.raises(OptionError) as error:
        read_prefix_file(str(path))
    assert part in str(error.value)
    assert str(path) in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="No such file"):
        read_prefix_file(str(tmp_path / "none.yaml"))
