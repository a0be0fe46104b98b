# SPDX-License-Identifier: Apache-2.0
"""Checks a whole vLLM configuration, and completes it, before the engine starts."""

import logging
from typing import Any

from polykv_vllm.attention.backend import BLOCK_SIZE_BASE, backend_class
from polykv_vllm.attention.device import (
    engine_reasons,
    model_reasons,
    platform_reasons,
)
from polykv_vllm.calibrate.errors import CalibrationError
from polykv_vllm.config import PolyKVConfig, parse_options
from polykv_vllm.errors import UnsupportedError
from polykv_vllm.formats import get_format, is_polykv_dtype
from polykv_vllm.pool.selection import CONNECTOR
from polykv_vllm.support import check_model
from polykv_vllm.windows.sizes import RECOMMENDED_WINDOWS

logger = logging.getLogger("vllm.polykv")

_BITS_THAT_NEED_WINDOWS = 2
_SPECULATION_WITH_WINDOWS = ("ngram", "suffix")
"""Methods without a draft model, which would need windows of its own."""

_MODEL_DTYPES = ("bfloat16", "float16", "float32")


def prepare_vllm_config(vllm_config: Any) -> None:
    """Check a configuration and settle what vLLM leaves open on the CPU.

    Args:
        vllm_config: See `check_vllm_config`.

    Raises:
        PolyKVError: See `check_vllm_config`.

    """
    _drop_forced_backend(vllm_config)
    check_vllm_config(vllm_config)
    _warn_of_idle_skips(vllm_config)
    _warn_of_missing_windows(vllm_config)
    _fit_skipped_layers(vllm_config)


def check_vllm_config(vllm_config: Any) -> None:
    """Refuse what cannot be served; all reasons are named at once.

    Args:
        vllm_config: vLLM's `VllmConfig` in which the engine or its draft model has
            one of our cache dtypes.

    Raises:
        OptionError: An option under `additional_config["polykv"]` is wrong.
        UnsupportedError: Anything else.

    """
    options = parse_options(vllm_config.additional_config)
    reasons = [
        *platform_reasons(options),
        *_engine_reasons(vllm_config),
        *_window_reasons(vllm_config, options),
    ]
    for model_config, cache_dtype in _served_models(vllm_config):
        found = _model_reasons(model_config, cache_dtype)
        reasons += found or _calibration_reasons(vllm_config, model_config, options)
    if reasons:
        listed = "".join(f"\n  - {reason}" for reason in reasons)
        raise UnsupportedError(
            f"--kv-cache-dtype {_cache_dtypes(vllm_config)} cannot serve "
            f"{vllm_config.model_config.model}:{listed}"
        )


def _served_models(vllm_config: Any) -> list[tuple[Any, str]]:
    """Return (model config, cache dtype) of each model that uses a dtype of ours."""
    cache_dtype = vllm_config.cache_config.cache_dtype
    models = [(vllm_config.model_config, cache_dtype)]
    draft = vllm_config.speculative_config
    if draft is not None and draft.draft_model_config not in (None, models[0][0]):
        draft_dtype = draft.kv_cache_dtype or cache_dtype
        models.append((draft.draft_model_config, draft_dtype))
    return [(model, dtype) for model, dtype in models if is_polykv_dtype(dtype)]


def _cache_dtypes(vllm_config: Any) -> str:
    return ", ".join(dict.fromkeys(d for _, d in _served_models(vllm_config)))


def _engine_reasons(vllm_config: Any) -> list[str]:
    reasons = engine_reasons(vllm_config)
    cache_config = vllm_config.cache_config
    block_size = cache_config.block_size
    # Where nobody asked for one, vLLM asks the backend before the engine starts (GPU),
    # or took 128 (CPU).
    if cache_config.user_specified_block_size and block_size % BLOCK_SIZE_BASE:
        reasons.append(
            f"--block-size {block_size}: multiples of {BLOCK_SIZE_BASE} are possible"
        )
    skipped = vllm_config.cache_config.kv_cache_dtype_skip_layers
    if skipped and vllm_config.model_config.is_hybrid:
        reasons.append(
            "--kv-cache-dtype-skip-layers with a model that has linear attention was "
            "not tested; leave the option away"
        )
    backend = vllm_config.attention_config.backend
    if backend is not None and backend.name != "CUSTOM":
        reasons.append(
            f"--attention-backend {backend.name} cannot read this cache; leave the "
            "option away"
        )
    parallel = vllm_config.parallel_config
    for kind in ("decode", "prefill"):
        size = getattr(parallel, f"{kind}_context_parallel_size")
        if size > 1:
            reasons.append(f"{kind} context parallelism is {size}; 1 is possible")
    return reasons


def _window_reasons(vllm_config: Any, options: PolyKVConfig) -> list[str]:
    """Look for what knows nothing of raw copies, or keeps others."""
    if options.windows is None or not options.windows.is_used:
        return []
    from vllm.platforms import current_platform

    obstacles = []
    if not current_platform.is_cpu():
        obstacles.append(f"the platform {current_platform.device_name} (possible: cpu)")
    speculation = vllm_config.speculative_config
    if speculation and speculation.method not in _SPECULATION_WITH_WINDOWS:
        possible = ", ".join(_SPECULATION_WITH_WINDOWS)
        obstacles.append(f"speculation by {speculation.method} (possible: {possible})")
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector not in (None, CONNECTOR):
        obstacles.append(f"the KV connector {transfer.kv_connector}")
    if vllm_config.use_v2_model_runner:
        obstacles.append("the model runner V2 (VLLM_USE_V2_MODEL_RUNNER)")
    return [
        f"the option windows cannot be had with {obstacle}: leave one of the two away"
        for obstacle in obstacles
    ]


def _model_reasons(model_config: Any, cache_dtype: str) -> list[str]:
    reasons = list(check_model(model_config.hf_config, cache_dtype).reasons)
    reasons += [] if reasons else model_reasons(model_config.hf_config, cache_dtype)
    if model_config.runner_type != "generate":
        reasons.append(
            f"--runner {model_config.runner_type}: generate is possible (pooling "
            "models were not tried)"
        )
    dtype = str(model_config.dtype).removeprefix("torch.")
    if dtype not in _MODEL_DTYPES:
        reasons.append(f"--dtype {dtype}: {', '.join(_MODEL_DTYPES)} are possible")
    return reasons


def _calibration_reasons(
    vllm_config: Any, model_config: Any, options: PolyKVConfig
) -> list[str]:
    """Look at the calibration that will be folded into a model, if there is one."""
    from polykv_vllm.attention.calibration import calibration_folder, calibration_for

    folder = calibration_folder(options.calibration, model_config)
    if folder is None:
        return []
    if vllm_config.lora_config is not None:
        reason = (
            f"--enable-lora with the calibration {folder}: an adapter of v_proj or "
            "o_proj is made for values that are not transformed; possible: "
            'calibration="none", or no adapters'
        )
        return [reason]
    try:
        calibration_for(folder, model_config)
    except CalibrationError as error:
        return [str(error)]
    return []


def _drop_forced_backend(vllm_config: Any) -> None:
    """Take back what vLLM chose by itself and its CPU platform would not heed.

    For Gemma 4, whose heads differ in size between layers, it asks for a Triton backend
    where there is no FlashAttention 4, on whatever platform.
    """
    attention_config = vllm_config.attention_config
    hf_config = vllm_config.model_config.hf_text_config
    backend = attention_config.backend
    if backend is None or backend.name != "TRITON_ATTN":
        return
    if getattr(hf_config, "is_heterogeneous", False):
        attention_config.backend = None


def _warn_of_missing_windows(vllm_config: Any) -> None:
    """Say what two bits cost without windows of full precision."""
    cache_dtype = vllm_config.cache_config.cache_dtype
    windows = parse_options(vllm_config.additional_config).windows
    if not is_polykv_dtype(cache_dtype) or (windows is not None and windows.is_used):
        return
    fmt = get_format(cache_dtype)
    if min(fmt.key_bits, fmt.value_bits) <= _BITS_THAT_NEED_WINDOWS:
        sink_tokens, recent_tokens = RECOMMENDED_WINDOWS
        logger.warning(
            "%s without windows of full precision loses much quality "
            '(docs/lowbit.md). Recommended: --additional-config \'{"polykv": '
            '{"windows": {"sink_tokens": %d, "recent_tokens": %d}}}\'',
            fmt.name,
            sink_tokens,
            recent_tokens,
        )


def _warn_of_idle_skips(vllm_config: Any) -> None:
    """Name entries of --kv-cache-dtype-skip-layers that vLLM would ignore silently."""
    num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    known = {"sliding_window", *map(str, range(num_layers))}
    for entry in vllm_config.cache_config.kv_cache_dtype_skip_layers:
        if entry not in known:
            logger.warning(
                "--kv-cache-dtype-skip-layers %s names no layer and has no effect; "
                "possible: 0 to %d, sliding_window",
                entry,
                num_layers - 1,
            )


def _fit_skipped_layers(vllm_config: Any) -> None:
    """Choose block sizes so that skipped layers do not cost the compression.

    In a model with sliding windows all KV cache groups share pages of one size. For
    skipped windows vLLM's CUDA platform finds block sizes whose pages nearly agree;
    its CPU platform does not ask, and would pad every compressed page to the size of
    an uncompressed one. Skipped full-attention layers keep the common block size on
    either platform, so there the loss can only be told.
    """
    cache_config = vllm_config.cache_config
    skipped = cache_config.kv_cache_dtype_skip_layers
    hf_config = vllm_config.model_config.hf_text_config
    cache_dtype = cache_config.cache_dtype
    if not skipped or not is_polykv_dtype(cache_dtype):
        return
    if check_model(hf_config, cache_dtype).num_sliding_layers == 0:
        return
    if not cache_config.user_specified_block_size:
        cache_config.block_size = BLOCK_SIZE_BASE  # the call below only raises it
    from vllm.platforms import current_platform

    backend = backend_class(get_format(cache_dtype))
    current_platform._align_heterogeneous_kv_block_size(vllm_config, backend)
    kinds = enumerate(getattr(hf_config, "layer_types", None) or ())
    full = [str(i) for i, kind in kinds if kind == "full_attention"]
    if costly := [layer for layer in skipped if layer in full]:
        logger.warning(
            "--kv-cache-dtype-skip-layers %s: skipping full-attention layers of a "
            "model with sliding windows pads all pages to the uncompressed size, so "
            "the cache holds hardly more tokens than without compression",
            " ".join(costly),
        )
