# SPDX-License-Identifier: Apache-2.0
"""Adapters in vLLM's hashes: by the files that they have, once the pool is in use.

`tests/e2e/features` reloads one in a real engine.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from polykv_vllm.pool import adapters
from polykv_vllm.seams import cache_salt

BLOCK = 32
PROMPT = list(range(2 * BLOCK))


@pytest.fixture(autouse=True)
def seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("POLYKV_CACHE", str(tmp_path / "cache"))
    change = cache_salt.SEAM.change
    was_installed = change.is_installed()
    change.install()
    adapters.watch()
    yield
    adapters.forget()
    if not was_installed:
        change.uninstall()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(b"weights")
    (path / "adapter_config.json").write_text("{}")
    return path


def replace(adapter: Path, weights: bytes) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(weights)


def hashes(adapter: Path | None, number: int = 1, name: str = "r") -> list[bytes]:
    """Return vLLM's hashes of a request, with the seam as every process has it."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    lora = LoRARequest("x", number, str(adapter)) if adapter else None
    sampling = SamplingParams(max_tokens=1)
    request = Request(
        name, PROMPT, sampling, None, lora_request=lora, block_hasher=hasher
    )
    return list(request.block_hashes)


def test_other_files_are_another_adapter(adapter: Path) -> None:
    """CASE 26: under the same name and path, loaded under a new id."""
    before = hashes(adapter)
    assert hashes(adapter) == before
    replace(adapter, b"others")
    assert not set(hashes(adapter, 2)) & set(before)
    replace(adapter, b"weights")
    assert hashes(adapter, 3) == before


def test_nothing_is_shared_until_it_is_loaded_again(adapter: Path) -> None:
    hashes(adapter)
    replace(adapter, b"others")
    first, second = hashes(adapter, name="a"), hashes(adapter, name="b")
    assert not set(first) & set(second)
    assert not set(first) & set(hashes(adapter, 2))


def test_without_the_pool_and_without_an_adapter_vllm_decides(adapter: Path) -> None:
    plain = hashes(None)
    adapters.forget()
    assert hashes(None) == plain
    before = hashes(adapter)
    replace(adapter, b"others")
    assert hashes(adapter) == before  # as vLLM has it: name and path
