# SPDX-License-Identifier: Apache-2.0
"""Which requests the pool serves, and under which names."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polykv_vllm.pool import adapters, public
from polykv_vllm.pool.disk.content import ContentNames, Context
from polykv_vllm.pool.disk.directory import block_path
from polykv_vllm.pool.disk.messages import RankAnswer
from polykv_vllm.pool.disk.planner import Planner

BLOCK = 32
PROMPT = list(range(100))


@pytest.fixture
def planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planner:
    monkeypatch.setenv("POLYKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(adapters, "_seen", {})
    planner = Planner(BLOCK)
    for rank in ("rank0", "rank1"):
        (tmp_path / rank).mkdir()
    planner.set_ranks({n: RankAnswer(str(tmp_path / f"rank{n}")) for n in range(2)})
    return planner


def request(adapter: Path | None = None, **options: Any) -> Any:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=1, **options.pop("sampling", {}))
    number = options.pop("number", 1)
    lora = LoRARequest(adapter.name, number, str(adapter)) if adapter else None
    return Request("r", PROMPT, sampling, None, lora_request=lora, **options)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(b"weights")
    (path / "adapter_config.json").write_text("{}")
    return path


def store(planner: Planner, asked: Any, ranks: tuple[int, ...], count: int) -> None:
    """Put files where the first blocks of a request are looked for."""
    context = planner._context(asked)
    assert context is not None
    for name in ContentNames(context, BLOCK).names(PROMPT, count):
        for rank in ranks:
            path = block_path(planner._ranks[rank], name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"")


def find(planner: Planner, asked: Any, num_computed: int = 0) -> int:
    planner.add(asked)
    return planner.find(asked, num_computed)


def test_what_every_rank_has_is_found(planner: Planner) -> None:
    store(planner, request(), (0,), 3)
    assert find(planner, request()) == 0
    store(planner, request(), (1,), 2)
    assert find(planner, request()) == 2 * BLOCK
    assert find(planner, request(), BLOCK) == BLOCK
    assert find(planner, request(cache_salt="a")) == 0


def test_the_last_token_is_always_computed(planner: Planner) -> None:
    """CASE 16, on disk: a prompt of whole blocks does not take its last one."""
    store(planner, request(), (0, 1), 3)
    asked = request()
    asked._all_token_ids[:] = PROMPT[: 3 * BLOCK]
    assert find(planner, asked) == 2 * BLOCK


def test_a_request_that_reads_no_cache(planner: Planner) -> None:
    store(planner, request(), (0, 1), 3)
    assert find(planner, request(sampling={"prompt_logprobs": 0})) == 0


def test_what_a_reset_will_remove_is_not_found(planner: Planner) -> None:
    store(planner, request(), (0, 1), 3)
    planner.clear()
    assert find(planner, request()) == planner.num_on_disk(None, PROMPT, 0) == 0
    assert planner.orders({}).clear  # the step that removes it
    assert find(planner, request()) == 3 * BLOCK


def test_pins_below_a_public_prefix_stay_on_disk(planner: Planner) -> None:
    """Their names have the salt in the first private block, as those of requests."""
    prefix = SimpleNamespace(salt="a", token_ids=PROMPT, held=[0, 0, 0])
    planner.pins = SimpleNamespace(version=1, prefixes={"p": prefix})
    public.add(PROMPT[:BLOCK], BLOCK)
    try:
        pinned = planner.orders({}).pinned
    finally:
        public.remove(PROMPT[:BLOCK])
    assert pinned == ContentNames(Context("a", None, 1), BLOCK).names(PROMPT, 3)


def test_one_worker_without_a_store_switches_all_off(tmp_path: Path) -> None:
    planner = Planner(BLOCK)
    planner.set_ranks({0: RankAnswer(str(tmp_path)), 1: RankAnswer(None)})
    assert find(planner, request()) == 0


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_reloaded_under_its_name_is_another(
    planner: Planner, adapter: Path, file: str
) -> None:
    """CASE 26."""
    first = planner._context(request(adapter))
    assert first is not None
    assert first != planner._context(request())
    (adapter / file).write_text("other content")
    # The engine may still have the old one loaded: it is not served at all.
    assert planner._context(request(adapter)) is None
    second = planner._context(request(adapter, number=2))
    assert second is not None and second != first


def test_an_adapter_without_files_is_not_served(
    planner: Planner, tmp_path: Path
) -> None:
    assert planner._context(request(tmp_path / "nowhere")) is None
    assert find(planner, request(tmp_path / "nowhere")) == 0
