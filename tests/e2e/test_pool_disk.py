# SPDX-License-Identifier: Apache-2.0
"""Blocks on disk: found after kill -9, never believed when damaged, kept apart.

A small random model in fp32; what a hit computes must be what a miss does, to the bit.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.pool.disk.writer import REST_S
from tests.e2e.harness import Engine
from tests.random_models import VOCABULARY, save_model

BLOCK = 32
PROMPT = [(7 * i * i + i) % VOCABULARY for i in range(10 * BLOCK + 10)]
NUM_GENERATED = 24  # enough to fill a block with the end of the prompt
OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "block_size": BLOCK,
    "kv_cache_memory_bytes": 16 << 20,
}
Answer = tuple[int, list[int], list[float]]


def start(model: Path, pool: Path, **options: Any) -> Engine:
    config = {"polykv": {"pool": {"path": str(pool)}}}
    return Engine(model, additional_config=config, **OPTIONS | options)


def ask(engine: Engine, prompt: list[int], **options: Any) -> Answer:
    """Return cached tokens, generated tokens, and their log-probabilities."""
    return answers(engine, [{"prompt_token_ids": prompt} | options])[0]


def answers(engine: Engine, prompts: list[dict[str, Any]]) -> list[Answer]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=NUM_GENERATED,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )
    outputs = engine.llm.generate(prompts, params, use_tqdm=False)
    return [
        (
            output.num_cached_tokens,
            list(output.outputs[0].token_ids),
            [next(iter(e.values())).logprob for e in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


def forget(engine: Engine) -> None:
    """Empty the cache in memory; the disk stays."""
    wait_until_written(engine)
    assert engine.llm.reset_prefix_cache()


def wait_until_written(engine: Engine) -> None:
    """The writer is behind by milliseconds, and tells of it in the next step."""
    time.sleep(0.5)
    engine.generate([[1, 2, 3]])


def counted(engine: Engine, name: str) -> int:
    return engine.counter(f"vllm:polykv_pool_{name}")


def files(pool: Path) -> list[Path]:
    return sorted(pool.glob("ranks/*/??/*"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return save_model(path, "llama", {"hidden_size": 192, "num_attention_heads": 3})


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pool") / "blocks"


@pytest.fixture(scope="module")
def miss(model: Path, pool: Path) -> Answer:
    """What was computed by an engine that was then killed, all of it, with -9."""
    engine = start(model, pool)
    answer = ask(engine, PROMPT)
    # All tokens but the last one have been computed: eleven blocks.
    deadline = time.monotonic() + 30
    while len(files(pool)) < (len(PROMPT) + NUM_GENERATED - 1) // BLOCK:
        assert time.monotonic() < deadline, files(pool)
        time.sleep(0.05)
    children = [int(p) for p in os.listdir("/proc") if p.isdigit()]
    mine = [p for p in children if is_below(p, os.getpid())]
    assert mine
    for process in mine:
        os.kill(process, signal.SIGKILL)
    del engine.llm
    return answer


def is_below(process: int, ancestor: int) -> bool:
    while process > 1:
        try:
            status = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            return False
        process = int(status.rsplit(")", 1)[1].split()[1])
        if process == ancestor:
            return True
    return False


@pytest.fixture(scope="module")
def engine(model: Path, pool: Path, miss: Answer) -> Iterator[Engine]:
    with start(model, pool) as engine:
        yield engine


def test_the_first_request_after_a_kill_hits(engine: Engine, miss: Answer) -> None:
    """CASE 24."""
    assert miss[0] == 0
    hit = ask(engine, PROMPT)
    assert hit[0] == 10 * BLOCK
    assert hit[1:] == miss[1:]
    longer = ask(engine, [*PROMPT, *miss[1]])  # a next turn: generated tokens too
    assert longer[0] == 11 * BLOCK


def test_what_is_on_disk_is_counted(engine: Engine, pool: Path) -> None:
    wait_until_written(engine)
    assert counted(engine, "restored") >= 10
    assert counted(engine, "disk_blocks") >= len(files(pool)) - 1
    assert counted(engine, "failed") == counted(engine, "damaged") == 0


@pytest.mark.parametrize("index", [0, 5, 9])
def test_damage_is_a_miss_and_nobody_uses_what_followed(
    engine: Engine, pool: Path, miss: Answer, index: int
) -> None:
    """CASE 24: also for requests that arrive together, and those after them."""
    ask(engine, PROMPT)
    forget(engine)
    before = counted(engine, "damaged")
    names = order(engine, pool)
    damaged = bytearray(names[index].read_bytes())
    damaged[len(damaged) // 2] ^= 0x10
    names[index].write_bytes(damaged)
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": PROMPT} for _ in range(3)]
    for found in [*answers(engine, prompts), ask(engine, PROMPT)]:
        assert found[1:] == miss[1:]
    forget(engine)
    assert counted(engine, "damaged") == before + 1
    # It was written again, and is believed again.
    assert ask(engine, PROMPT) == (10 * BLOCK, *miss[1:])


def order(engine: Engine, pool: Path) -> list[Path]:
    """Return the files of the prompt's blocks in the order of their tokens."""
    from polykv_vllm.pool.disk.content import ContentNames, Context

    names = ContentNames(Context(), BLOCK).names(PROMPT, 10)
    (rank,) = pool.glob("ranks/*")
    return [rank / name.hex()[:2] / name.hex() for name in names]


def test_missing_and_torn_files_are_misses(
    engine: Engine, pool: Path, miss: Answer
) -> None:
    ask(engine, PROMPT)
    forget(engine)
    names = order(engine, pool)
    names[7].unlink()
    os.truncate(names[4], 1000)
    found = ask(engine, PROMPT)
    assert found[0] in (4 * BLOCK, 7 * BLOCK)  # as vLLM counts what it had promised
    assert found[1:] == miss[1:]


def test_salts_are_kept_apart(engine: Engine, miss: Answer) -> None:
    """CASES 26 and 29: neither in memory nor on disk."""
    forget(engine)
    other = ask(engine, PROMPT, cache_salt="tenant")
    assert other[0] == 0
    forget(engine)
    assert ask(engine, PROMPT, cache_salt="tenant")[0] == 10 * BLOCK
    assert ask(engine, PROMPT, cache_salt="another")[0] == 0


def test_one_copy_in_memory_of_what_comes_from_disk(
    engine: Engine, miss: Answer
) -> None:
    """Requests that arrive together share the blocks that one of them loads."""
    forget(engine)
    before = counted(engine, "restored")
    prompts: list[dict[str, Any]] = [
        {"prompt_token_ids": [*PROMPT[: 10 * BLOCK], n, n]} for n in range(6)
    ]
    found = answers(engine, prompts)
    assert [cached for cached, *_ in found] == [10 * BLOCK] * 6
    assert counted(engine, "restored") == before + 10


def test_a_broken_directory_costs_nothing_but_the_disk(
    engine: Engine, pool: Path, miss: Answer
) -> None:
    """CASE 25: counted and logged; serving goes on from memory."""
    (rank,) = pool.glob("ranks/*")
    away = rank.with_name("away")
    rank.rename(away)
    rank.write_text("a file in its place")
    try:
        assert engine.llm.reset_prefix_cache()
        assert ask(engine, PROMPT)[1:] == miss[1:]
        assert ask(engine, [9, *PROMPT])[0] == 0
        time.sleep(0.5)
        assert ask(engine, [9, *PROMPT])[0] == 10 * BLOCK
        assert counted(engine, "failed") >= 1
    finally:
        rank.unlink()
        away.rename(rank)
        time.sleep(REST_S)  # until the writer tries again


def test_a_reset_that_asks_for_it_empties_the_disk(engine: Engine, pool: Path) -> None:
    assert files(pool)
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    engine.generate([[1, 2, 3]])
    assert not files(pool)


def test_other_weights_find_nothing(
    engine: Engine,
    miss: Answer,
    pool: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """CASE 23, on the engine; `tests/pool/disk` has the fields one by one."""
    ask(engine, [5, *PROMPT])
    wait_until_written(engine)
    assert files(pool)
    other = save_model(
        tmp_path,
        "llama",
        {"hidden_size": 192, "num_attention_heads": 3, "initializer_range": 0.06},
    )
    with start(other, pool) as changed:
        assert ask(changed, [5, *PROMPT])[0] == 0
    told = capfd.readouterr()
    assert "weights: here" in told.out + told.err
