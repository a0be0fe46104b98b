# SPDX-License-Identifier: Apache-2.0
"""What the front end accepts and refuses; no engine is started."""

import json
from pathlib import Path
from typing import Any

import pytest

from polykv_vllm.errors import OptionError, UnsupportedError
from tests.families import SERVED

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 256,
    "num_hidden_layers": 4,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    "sliding_window": 512,
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
}
COHERE = LLAMA | {"architectures": ["CohereForCausalLM"], "model_type": "cohere"}


@pytest.fixture
def create(tmp_path: Path, installed: None) -> Any:
    """Create an engine configuration for a model that has only a config.json."""

    def create(config: dict[str, Any], **options: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        (tmp_path / "config.json").write_text(json.dumps(config))
        options = {"kv_cache_dtype": "polykv", "skip_tokenizer_init": True} | options
        return EngineArgs(model=str(tmp_path), **options).create_engine_config()

    return create


def test_accepts_a_served_model(create: Any) -> None:
    config = create(LLAMA, additional_config={"polykv": {"isa": "scalar"}})
    assert config.cache_config.cache_dtype == "polykv"
    assert config.cache_config.block_size == 128


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (
            COHERE,
            {},
            "CohereForCausalLM is not served: it was not tested; served: BLOOM",
        ),
        (
            SERVED["qwen3-next"].config().to_dict(),
            {"kv_cache_dtype_skip_layers": ["3"]},
            "skip-layers with a model that has linear attention was not tested",
        ),
        (DEEPSEEK, {}, r"multi-head latent attention \(MLA\)"),
        (LLAMA | {"head_dim": 48}, {}, "head size 48; supported.*64, 80, 96"),
        (LLAMA, {"block_size": 16}, "--block-size 16: multiples of 32 are possible"),
        (LLAMA, {"attention_backend": "FLASH_ATTN"}, "FLASH_ATTN cannot read"),
        (LLAMA, {"runner": "pooling"}, "--runner pooling: generate is possible"),
        (
            LLAMA,
            {"additional_config": {"polykv": {"isa": "neon"}}},
            "isa='neon' is not available; here: auto, .*scalar",
        ),
        (GEMMA | {"use_bidirectional_attention": True}, {}, "both directions"),
    ],
)
def test_refuses_by_name(
    create: Any, model: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason) as error:
        create(model, **options)
    assert "--kv-cache-dtype polykv cannot serve" in str(error.value)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"window": 128}, r"\['window'\] = 128: there is no such option; options: isa"),
        ({"isa": 512}, r"\['isa'\] = 512: not allowed; allowed: 'auto', 'amx'"),
        (["isa"], "must be a mapping of options, not"),
    ],
)
def test_refuses_wrong_options(create: Any, given: Any, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        create(LLAMA, additional_config={"polykv": given})


def test_another_platform_is_named(
    create: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "device_name", "abacus")
    with pytest.raises(UnsupportedError, match="platform is abacus; possible: cpu"):
        create(LLAMA)


def test_all_reasons_come_at_once(create: Any) -> None:
    with pytest.raises(UnsupportedError) as error:
        create(COHERE | {"head_dim": 72}, block_size=16)
    for part in ("CohereForCausalLM", "head size 72", "--block-size 16"):
        assert part in str(error.value)


def test_the_scheduler_is_named_for_our_dtypes_only(create: Any) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.core.sched.scheduler import Scheduler

    def scheduler(**options: Any) -> Any:
        return create(LLAMA, **options).scheduler_config.scheduler_cls

    assert issubclass(resolve_obj_by_qualname(scheduler()), Scheduler)
    assert scheduler(kv_cache_dtype="auto") is None
    assert scheduler(enable_prefix_caching=False) is None
    assert scheduler(additional_config={"polykv": {"single_copy": False}}) is None
    assert scheduler(scheduler_cls="own.Scheduler") == "own.Scheduler"


@pytest.mark.parametrize("model", [COHERE, LLAMA | {"head_dim": 80}])
def test_other_dtypes_are_not_our_business(create: Any, model: dict[str, Any]) -> None:
    wrong = {"polykv": {"window": 128}}
    config = create(model, kv_cache_dtype="auto", additional_config=wrong)
    assert config.cache_config.cache_dtype == "auto"


def test_a_draft_model_is_checked_too(create: Any, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(COHERE))
    speculation = {"model": str(draft), "num_speculative_tokens": 2}
    with pytest.raises(UnsupportedError, match="CohereForCausalLM is not served"):
        create(LLAMA, speculative_config=speculation | {"method": "draft_model"})


def test_skipped_windows_share_pages(create: Any) -> None:
    skipped = ["sliding_window"]
    config = create(GEMMA, kv_cache_dtype_skip_layers=skipped).cache_config
    page_bytes = 96 * 2 * 356  # tokens, KV heads, bytes of a slot
    assert (config.block_size, config.skip_page_size_padded) == (96, page_bytes)
    config = create(GEMMA, kv_cache_dtype_skip_layers=skipped, block_size=128)
    assert config.cache_config.block_size == 128


WINDOWS = {"polykv": {"windows": {"sink_tokens": 64, "recent_tokens": 256}}}


def test_windows_with_ngram_drafts(create: Any) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    config = create(LLAMA, additional_config=WINDOWS, speculative_config=speculation)
    assert config.additional_config == WINDOWS


def test_windows_refuse_what_knows_nothing_of_them(create: Any, tmp_path: Path) -> None:
    from vllm.config import KVTransferConfig

    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(LLAMA))
    speculation = {"method": "draft_model", "model": str(draft)}
    speculation |= {"num_speculative_tokens": 2}
    transfer = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    with pytest.raises(UnsupportedError) as error:
        create(
            LLAMA,
            additional_config=WINDOWS,
            speculative_config=speculation,
            kv_transfer_config=transfer,
        )
    for part in ("windows", "draft_model", "ngram", "connector ExampleConnector"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("dtype", "windows", "is_told"),
    [
        ("polykv_k2v2", None, True),
        ("polykv_k3v2", {"sink_tokens": 0, "recent_tokens": 0}, True),
        ("polykv_k2v2", {"sink_tokens": 16, "recent_tokens": 128}, False),
        ("polykv_k3v3", None, False),
    ],
)
def test_two_bits_without_windows_are_told(
    create: Any,
    caplog: pytest.LogCaptureFixture,
    dtype: str,
    windows: dict[str, int] | None,
    is_told: bool,
) -> None:
    import logging

    logger = logging.getLogger("vllm.polykv")
    logger.addHandler(caplog.handler)
    try:
        options = {"polykv": {"windows": windows} if windows else {}}
        create(LLAMA, kv_cache_dtype=dtype, additional_config=options)
    finally:
        logger.removeHandler(caplog.handler)
    assert ('"recent_tokens": 256' in caplog.text) == is_told


@pytest.mark.parametrize("skipped", ["99", "all"])
def test_skips_without_effect_are_told(
    create: Any, skipped: str, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    logging.getLogger("vllm.polykv").addHandler(caplog.handler)
    create(LLAMA, kv_cache_dtype_skip_layers=[skipped])
    assert f"{skipped} names no layer" in caplog.text
