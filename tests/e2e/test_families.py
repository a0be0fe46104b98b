# SPDX-License-Identifier: Apache-2.0
"""Every served family: a small model with random weights on the engine.

One process tries them all (`family_worker`), in the order of the table, while the
tests wait for its results.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.process import ProcessGroup
from polykv_vllm.support import LayerShape, check_model
from tests.e2e.family_worker import CHUNK_TOKENS
from tests.e2e.harness import UNIT, replay_tolerance
from tests.families import SERVED
from tests.projection_samples import projection_errors

# Mean distance of a log-probability from vLLM's own cache, in nats: what quantization
# does to random weights. Without its soft cap, ALiBi or sinks a model of the table is
# 0.07 to 0.9 away with k8v8, with another window or scale 0.02 to 2.
STOCK_TOLERANCE = {"k8v8": 0.05, "k8v4": 0.25, "k7v4": 0.25, "k8v3": 0.5}
# Of what is read in the weights, beside samples; a projection whose rows or norms are
# taken for others is more than 0.1 away.
PROJECTION_TOLERANCE = 0.05
MOE_FACTOR = 2  # near a tie, a token goes to another expert

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def result(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Return a function that waits for what a family's engine said."""
    selected = {
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and hasattr(item, "callspec")
    }
    directory = tmp_path_factory.mktemp("families")
    names = [name for name in SERVED if name in selected]
    command = [sys.executable, "-m", "tests.e2e.family_worker", str(directory)]
    with ProcessGroup(directory / "log") as group:
        process = group.start([*command, *names])

        def wait(name: str) -> dict[str, Any]:
            path: Path = directory / f"{name}.json"
            while not path.exists():
                has_ended = process.poll() is not None
                if has_ended and not path.exists():
                    pytest.fail((directory / "log").read_text()[-4000:])
                time.sleep(0.1)
            found = json.loads(path.read_text())
            assert "error" not in found, found["error"]
            return dict(found)

        yield wait


def test_the_table_has_every_kind_of_group() -> None:
    """Case 14: heads and KV heads are mixed up where few shapes are tried."""
    configs = (family.config() for family in SERVED.values())
    supports = [check_model(config, "polykv") for config in configs]
    assert {x.num_kv_heads for x in supports} >= {1, 2, 3, 4}
    groups = {x.num_heads // x.num_kv_heads for x in supports}
    assert groups >= {1, 2, 3, 4, 7, 8}


@pytest.mark.parametrize("name", SERVED)
def test_family(name: str, result: Callable[[str], dict[str, Any]]) -> None:
    family, found = SERVED[name], result(name)
    support = check_model(family.config(), family.kv_cache_dtype)
    assert support.ok, support.reasons

    # No layer keeps another cache, and each is what `polykv check` takes it for.
    layers = found["layers"]
    assert {layer["impl"] for layer in layers} == {"PolyKVImpl"}
    assert len(layers) == support.num_layers
    assert {x["num_heads"] for x in layers} == {support.num_heads}
    shapes = [LayerShape(x["num_kv_heads"], x["head_size"]) for x in layers]
    assert sorted(shapes, key=str) == sorted(support.layer_shapes, key=str)
    assert {x["treatment"] for x in layers} == {"channel_scale_hadamard"}
    windows = [x["sliding_window"] for x in layers if x["sliding_window"]]
    assert len(windows) == support.num_sliding_layers
    assert set(windows) <= {support.sliding_window}
    tokens = found["num_blocks"] * found["block_size"]
    for layer, shape in zip(layers, shapes, strict=True):
        assert layer["cache_bytes"] == tokens * support.layer_bytes_per_token(shape)

    # Its scales come from what the weights really do (docs/keys.md).
    errors = projection_errors(
        Path(found["model"]), family.architecture, found["projections"]
    )
    assert set(found["projections"]) == {layer["name"] for layer in layers}
    assert max(errors.values()) < PROJECTION_TOLERANCE

    # The kernels compute what the reference does, prompt and new tokens.
    tolerance = replay_tolerance(UNIT[family.dtype], family.config().num_hidden_layers)
    assert found["replay_difference"] <= tolerance
    # A hit is the same bits as a miss.
    block_size = found["block_size"]
    assert found["cached_tokens"] == CHUNK_TOKENS // block_size * block_size > 0
    assert found["hit_difference"] == 0.0
    # Case 15: the first request after the start is like a later one.
    assert found["first_difference"] == 0.0
    # Nothing of the model's attention is left out.
    fmt = support.fmt
    assert fmt is not None
    tolerance = STOCK_TOLERANCE[fmt.name.split("_")[1]]
    if family.is_moe:
        tolerance *= MOE_FACTOR
    assert 0 < found["stock_difference"] < tolerance
