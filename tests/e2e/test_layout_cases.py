# SPDX-License-Identifier: Apache-2.0
"""Layout and accounting where other systems broke: pages, and what fits.

Cases 11, 14 and 15 are in `test_skip_layers.py` and `test_families.py`, which also has
a model whose layers have different head sizes (case 12, gemma4-text).
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.process import ProcessGroup
from polykv_vllm.support import check_model
from tests.e2e.layout_worker import PADDED_CACHE_BYTES, SMALL_CACHE_BYTES
from tests.families import Family


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory: Path = tmp_path_factory.mktemp("layout")
    command = [sys.executable, "-m", "tests.e2e.layout_worker", str(directory)]
    with ProcessGroup(directory / "log") as group:
        return_code = group.start(command).wait()
    assert return_code == 0, (directory / "log").read_text()[-4000:]
    return dict(json.loads((directory / "result.json").read_text()))


def test_pages_that_do_not_divide(result: dict[str, Any]) -> None:
    """Case 12: a compressed page of 356 bytes a row beside one of 1,024 is padded."""
    found = result["padded"]
    assert list(found["layers"].values()).count("PolyKVImpl") == 2
    # Blocks times the larger page are the bytes allocated, once for all three layers.
    (num_blocks, num_kv_heads, block_size, row), *others = found["shapes"].values()
    assert num_blocks == found["num_blocks"] and row == 356
    page_bytes = num_kv_heads * block_size * 2 * 256 * 2  # of the bf16 layer
    assert others[-1] == [num_blocks, num_kv_heads, block_size, 512]
    storages = {address: size for address, size in found["storages"]}
    assert sum(storages.values()) == num_blocks * page_bytes
    assert 0 <= PADDED_CACHE_BYTES - num_blocks * page_bytes < page_bytes
    # And what is stored there is found again.
    assert found["cached_tokens"] == 288 and found["hit_difference"] == 0.0


def test_an_error_names_the_true_maximum(result: dict[str, Any]) -> None:
    """Case 13: counted in compressed bytes; one token more does not start."""
    found = result["capacity"]
    assert "max seq len (2048)" in found["error"]
    config = Family("llama", "LlamaForCausalLM").config()
    block_bytes = 32 * check_model(config, "polykv").bytes_per_token
    num_blocks = SMALL_CACHE_BYTES // block_bytes - 1  # vLLM keeps the null block
    assert found["longest"] == num_blocks * 32
    assert found["longest"] > 2.7 * found["stock_longest"]
    assert f"max seq len ({found['longest'] + 1})" in found["beyond"]


def test_requests_of_the_maximum_end(result: dict[str, Any]) -> None:
    """Case 13: each fills the whole cache; none waits for ever."""
    found = result["capacity"]
    assert found["lengths"] == [found["longest"]] * 3
