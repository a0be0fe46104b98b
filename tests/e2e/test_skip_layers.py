# SPDX-License-Identifier: Apache-2.0
"""Case 11, `--kv-cache-dtype-skip-layers`: some layers keep vLLM's own cache."""

from pathlib import Path

from tests.e2e.conftest import TEXT
from tests.e2e.harness import Engine

OURS, STOCK = "PolyKVImpl", "CPUAttentionBackendImpl"


def backends(engine: Engine) -> list[str]:
    """Implementation class of each layer, in the model's order."""
    layers = engine.call("polykv_attention_layers")
    number = {name: int(name.split(".layers.")[1].split(".")[0]) for name in layers}
    return [layers[name] for name in sorted(layers, key=number.__getitem__)]


def check_serving(engine: Engine, num_tokens: int, num_cached_tokens: int) -> None:
    """Score a text; a hit computes the same last chunk as a miss."""
    prompt = engine.tokenize(TEXT)[:num_tokens]
    miss = engine.score(prompt)
    hit = engine.score(prompt, read_cache=True)
    assert miss.mean() > -3.0
    assert hit.num_cached_tokens == num_cached_tokens
    assert hit.max_difference(miss) == 0.0


def test_layers_by_index(smollm2: Path) -> None:
    options = {"kv_cache_dtype_skip_layers": ["0", "29"], "block_size": 32}
    with Engine(smollm2, max_num_batched_tokens=288, **options) as engine:
        assert backends(engine) == [STOCK, *[OURS] * 28, STOCK]
        check_serving(engine, 300, 288)
        # 28 layers of 92 and 2 of 256 bytes, against 30 of 256 bytes.
        stock_tokens = (128 << 20) // (30 * 3 * 256)
        expected = stock_tokens * 30 * 256 / (28 * 92 + 2 * 256)
        assert engine.capacity_tokens() > 0.98 * expected


def test_all_layers(smollm2: Path) -> None:
    skipped = [str(layer) for layer in range(30)]
    with Engine(
        smollm2, max_num_batched_tokens=256, kv_cache_dtype_skip_layers=skipped
    ) as engine:
        assert backends(engine) == [STOCK] * 30
        check_serving(engine, 300, 256)


def test_sliding_windows(gemma3: Path) -> None:
    options = {"kv_cache_dtype_skip_layers": ["sliding_window"]}
    with Engine(gemma3, max_num_batched_tokens=384, **options) as engine:
        found = backends(engine)
        assert found.count(OURS) == 3 and found.count(STOCK) == 15
        shapes = engine.call("polykv_cache_shapes")
        page_bytes = {
            shape[2] * shape[3] * (1 if shape[3] < 512 else 2)
            for shape in shapes.values()
        }
        # 96 compressed tokens beside 32 uncompressed ones: nearly the same page.
        assert page_bytes == {96 * 356, 32 * 512 * 2}
        check_serving(engine, 800, 768)
