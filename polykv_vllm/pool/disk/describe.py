# SPDX-License-Identifier: Apache-2.0
"""Reads from a worker what the bytes of its blocks mean.

Not among the fields: vLLM's version and the instruction set. They may change the last
bit of what is computed, not its meaning, and the pool is to outlive an update.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from polykv_vllm import envs, ops
from polykv_vllm.config import parse_options
from polykv_vllm.keys import format_identity
from polykv_vllm.pool.disk.identity import RankIdentity
from polykv_vllm.pool.disk.weights import UnidentifiedError, files_digest, weight_files

WITHOUT_FILES = ("dummy",)
"""Values of `--load-format` whose weights are in no file."""

# Of the model's configuration; they say where it came from and not what it computes.
_IRRELEVANT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def identify(vllm_config: Any, layers: tuple[str, ...]) -> RankIdentity:
    """Return the identity of this process's blocks.

    Args:
        vllm_config: vLLM's `VllmConfig`, in a worker whose weights are loaded.
        layers: Names of the attention layers, in the order of their bytes.

    Raises:
        UnidentifiedError: The weights cannot be told from others.
        OSError: Their files cannot be read.

    """
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    block_size = vllm_config.cache_config.block_size
    options = parse_options(vllm_config.additional_config)
    return RankIdentity(
        {
            "layers": _layer_formats(vllm_config, layers, block_size),
            "weights": _weights_digest(vllm_config),
            "rope": _json(getattr(model.hf_text_config, "rope_parameters", None)),
            "model": _config_digest(model.hf_config),
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "block_size": block_size,
            "arithmetic": "fast" if options.fast_arithmetic else "exact",
            "place": {
                "tensor_parallel": parallel.tensor_parallel_size,
                "pipeline_parallel": parallel.pipeline_parallel_size,
                "rank": parallel.rank,
            },
        }
    )


def _layer_formats(
    vllm_config: Any, layers: tuple[str, ...], block_size: int
) -> list[str]:
    """Return for each layer its name, its KV heads and the format of its bytes."""
    context = vllm_config.compilation_config.static_forward_context
    found = []
    for name in layers:
        impl = context[name].impl
        meaning = format_identity(
            impl.fmt,
            impl.head_size,
            block_size,
            impl.key_transform,
            impl.calibration,
            ops.layout_id(impl.isa),
        )
        window = f"window={impl.sliding_window}"
        found.append(f"{name} heads={impl.num_kv_heads} {window} {meaning}")
    return found


def _weights_digest(vllm_config: Any) -> str:
    model, load_format = vllm_config.model_config, vllm_config.load_config.load_format
    if load_format in WITHOUT_FILES:
        raise UnidentifiedError(
            f"--load-format {load_format} has no files by which to know the weights"
        )
    files = weight_files(_model_path(model))
    return files_digest(files, envs.cache_dir() / "weight-digests.json")


def _model_path(model_config: Any) -> Path:
    path = Path(model_config.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:  # the worker has loaded it, so it is there
        found = snapshot_download(
            model_config.model, revision=model_config.revision, local_files_only=True
        )
    except (LocalEntryNotFoundError, ValueError) as error:
        raise UnidentifiedError(
            f"the files of {model_config.model} are not on this machine: {error}"
        ) from error
    return Path(found)


def _config_digest(hf_config: Any) -> str:
    fields = {k: v for k, v in hf_config.to_dict().items() if k not in _IRRELEVANT}
    return hashlib.sha256(_json(fields).encode()).hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
