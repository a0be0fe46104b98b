# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import pytest

from polykv_vllm.seams import layer_cache_dtype


@pytest.mark.parametrize(
    ("cache_dtype", "arguments", "is_completed"),
    [
        ("polykv", {}, True),
        ("polykv", {"cache_config": "given"}, False),
        ("polykv", {"attn_type": "encoder_only"}, False),
        ("fp8", {}, False),
        ("auto", {}, False),
    ],
)
def test_completes_what_a_model_forgot(
    monkeypatch: pytest.MonkeyPatch,
    cache_dtype: str,
    arguments: dict[str, Any],
    is_completed: bool,
) -> None:
    """Only decoder layers without a cache config, and only with a dtype of ours."""
    import vllm.config

    cache_config = SimpleNamespace(cache_dtype=cache_dtype)
    monkeypatch.setattr(
        vllm.config,
        "get_current_vllm_config",
        lambda: SimpleNamespace(cache_config=cache_config),
    )
    calls: list[Any] = []

    def original(
        self: Any,
        num_heads: int,
        cache_config: Any = None,
        attn_type: str = "decoder",
        **extra: Any,
    ) -> None:
        calls.append((self, num_heads, cache_config, attn_type, extra))

    replaced = layer_cache_dtype.SEAM.change.make(original)
    replaced("layer", 4, sinks=1, **arguments)
    expected = cache_config if is_completed else arguments.get("cache_config")
    attn_type = arguments.get("attn_type", "decoder")
    assert calls == [("layer", 4, expected, attn_type, {"sinks": 1})]


@pytest.mark.compat
def test_falcon_still_forgets() -> None:
    """When this fails, vLLM hands the config over: delete the seam."""
    import ast
    import inspect

    from vllm.model_executor.models import falcon

    calls = [
        {keyword.arg for keyword in node.keywords}
        for node in ast.walk(ast.parse(inspect.getsource(falcon)))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Attention"
    ]
    assert any("cache_config" not in call for call in calls)
