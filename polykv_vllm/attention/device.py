# SPDX-License-Identifier: Apache-2.0
"""Which device vLLM serves on, and what the kernels for it cannot do."""

from typing import Any

from polykv_vllm import ops
from polykv_vllm.config import PolyKVConfig
from polykv_vllm.formats import get_format
from polykv_vllm.kernels.triton.config import MIN_CAPABILITY
from polykv_vllm.support import check_model

PLATFORMS = (
    "cpu (vLLM's CPU build), and cuda (NVIDIA, compute capability "
    f"{MIN_CAPABILITY // 10}.{MIN_CAPABILITY % 10} or later)"
)
"""What can be served on, in words."""


def kernel_device() -> str:
    """Return the type of device that the kernels run on: "cpu" or "cuda"."""
    from vllm.platforms import current_platform

    return "cuda" if current_platform.is_cuda() else "cpu"


def hardware_reasons() -> list[str]:
    """Return why no layer can be served here, whatever it is like."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return []
    if not current_platform.is_cuda():
        name = current_platform.device_name or "not known to vLLM"
        return [f"the platform is {name}; possible: {PLATFORMS}"]
    capability = current_platform.get_device_capability()
    if capability is None:
        return []
    return ops.cuda_capability_reasons(capability.to_int())


def platform_reasons(options: PolyKVConfig) -> list[str]:
    """Return why this machine cannot serve; nothing is read from a device."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return _cpu_reasons(options)
    if not current_platform.is_cuda():
        return hardware_reasons()
    reasons = []
    try:
        ops.require_triton()
    except NotImplementedError as error:
        reasons.append(str(error))
    reasons += hardware_reasons()
    asked = {
        f"isa={options.isa!r}": options.isa != "auto",
        "fast_arithmetic": options.fast_arithmetic,
        "pool.path": options.pool.path is not None,
    }
    reasons += [
        f"the option {name} is of the CPU kernels; leave it away on a GPU"
        for name, is_asked in asked.items()
        if is_asked
    ]
    return reasons


def _cpu_reasons(options: PolyKVConfig) -> list[str]:
    try:
        available = ops.available_isas()
        ops.current_isa()
    except (ImportError, OSError, ValueError) as error:
        return [f"the CPU kernels cannot be used: {error}"]
    if options.isa not in ("auto", *available):
        possible = ", ".join(("auto", *available))
        return [f"the option isa={options.isa!r} is not available; here: {possible}"]
    return []


def model_reasons(hf_config: Any, cache_dtype: str) -> list[str]:
    """Return why a model that can be served on a CPU has no kernels on this device."""
    if kernel_device() == "cpu":
        return []
    support = check_model(hf_config, cache_dtype)
    text_config = getattr(hf_config, "text_config", None) or hf_config
    is_bloom = support.architecture.startswith("Bloom")
    terms = {
        "a logits soft cap": getattr(text_config, "attn_logit_softcapping", None),
        "ALiBi slopes": getattr(text_config, "alibi", False) or is_bloom,
        "attention sinks": support.architecture.startswith("GptOss"),
    }
    fmt, num_heads = get_format(cache_dtype), support.num_heads
    reasons = [
        reason
        for shape in dict.fromkeys(support.layer_shapes)
        for reason in ops.gpu_shape_reasons(
            fmt, shape.head_size, num_heads // shape.num_kv_heads
        )
    ]
    asked = [name for name, is_asked in terms.items() if is_asked]
    return list(dict.fromkeys(reasons)) + [
        f"it has {name}, which the GPU kernels do not compute yet; the CPU kernels do"
        for name in asked
    ]


def engine_reasons(vllm_config: Any) -> list[str]:
    """Return which settings of an engine were not tried on a GPU."""
    if kernel_device() == "cpu":
        return []
    asked = {
        "--enable-dbo (microbatches)": vllm_config.parallel_config.use_ubatching,
    }
    return [
        f"{name} was not tried on a GPU; leave it away"
        for name, is_asked in asked.items()
        if is_asked
    ]
