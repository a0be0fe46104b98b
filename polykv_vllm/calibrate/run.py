# SPDX-License-Identifier: Apache-2.0
"""`polykv calibrate`: from a model and a text to a folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from polykv_vllm import __version__
from polykv_vllm.calibrate.artifact import (
    FORMAT_VERSION,
    CalibrationRecord,
    TextRecord,
    save_calibration,
)
from polykv_vllm.calibrate.build import Transforms, build_transforms
from polykv_vllm.calibrate.collect import collect
from polykv_vllm.calibrate.errors import CalibrationError
from polykv_vllm.calibrate.fold import check_foldable, model_digests
from polykv_vllm.calibrate.shape import ModelShape, attention_modules
from polykv_vllm.calibrate.statistics import Statistics
from polykv_vllm.calibrate.text import DEFAULT_FIELD, cut_sequences, read_texts
from polykv_vllm.calibrate.transforms import (
    DAMPING,
    condition_numbers,
)
from polykv_vllm.evaluate.text import digest, load_tokenizer
from polykv_vllm.formats import power_blocks

SEQUENCES, SEQUENCE_TOKENS = 128, 2048
DTYPE, DTYPES = "float32", ("float32", "bfloat16")
QUICK_SEQUENCES, QUICK_SEQUENCE_TOKENS = 64, 512
_LIBRARIES = ("torch", "transformers", "safetensors")


@dataclass(frozen=True)
class CalibrateOptions:
    """What the command line says.

    Attributes:
        model: Directory or hub name.
        texts: Files.
        field: Of `.jsonl` files, see `text.read_texts`.
        sequences: Most sequences.
        sequence_tokens: Tokens of each; None: 2048, or what the model takes.
        seed: Of the choice of sequences, and of random rotations.
        damping: See `transforms.wush`.
        transform: One of `build.TRANSFORMS`.
        center_keys: See `build.build_transforms`.
        dtype: Of weights and activations, one of `DTYPES`.

    """

    model: str
    texts: Sequence[Path]
    field: str = DEFAULT_FIELD
    sequences: int = SEQUENCES
    sequence_tokens: int | None = None
    seed: int = 0
    damping: float = DAMPING
    transform: str = "wush"
    center_keys: bool = True
    dtype: str = DTYPE


@dataclass(frozen=True)
class CalibrateResult:
    """What `calibrate` has written.

    Attributes:
        record: As in the folder.
        statistics: What the transforms were made from.
        warnings: For the user.

    """

    record: CalibrationRecord
    statistics: Statistics
    warnings: list[str]


def load_model(path: str, dtype: str = DTYPE) -> Any:
    """Return a causal language model of transformers, in evaluation mode.

    Args:
        path: Directory or hub name.
        dtype: One of `DTYPES`. A CPU without instructions for bf16 is five times as
            fast in fp32.

    Raises:
        CalibrationError: There is none, or its weights are quantized.

    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
        if quantization := getattr(config, "quantization_config", None):
            method = getattr(quantization, "quant_method", None) or (
                quantization.get("quant_method")
                if isinstance(quantization, dict)
                else quantization
            )
            raise CalibrationError(
                f"{path} is a quantized checkpoint ({method}): transforms of values "
                "are folded into weights, which must be bf16, fp16 or fp32"
            )
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path} cannot be loaded: {error}") from error
    return model.eval()


def calibrate(
    options: CalibrateOptions,
    output: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CalibrateResult:
    """Read the text with the model and write a calibration.

    Args:
        options: What to do.
        output: Folder for the two files.
        progress: Told how many sequences are done, of how many.

    Raises:
        CalibrationError: The text or the model cannot be used.
        UnsupportedError: The model is built from other parts.

    """
    content = read_texts(options.texts, options.field)
    tokenizer = load_tokenizer(options.model)
    model = load_model(options.model, options.dtype)
    limit = model.config.get_text_config(decoder=True).max_position_embeddings
    length = options.sequence_tokens or min(SEQUENCE_TOKENS, limit)
    if length > limit:
        raise CalibrationError(
            f"sequences of {length:,} tokens, the model takes {limit:,}: choose a "
            "smaller --sequence-tokens"
        )
    for index, module in enumerate(attention_modules(model)):
        check_foldable(module, f"layer {index}", ("v_proj", "o_proj"))
    sequences = cut_sequences(
        content, tokenizer, options.sequences, length, options.seed
    )
    total = len(sequences)
    progress(0, total)
    statistics = collect(
        model,
        sequences,
        aware=options.transform == "wush_a",
        progress=lambda done: progress(done, total),
    )
    warnings = _warnings(options, length, statistics)
    read = TextRecord(
        digest=digest(content),
        files=[path.name for path in options.texts],
        sequences=total,
        tokens=statistics.tokens,
        seed=options.seed,
    )
    record = write_calibration(
        output,
        model,
        statistics,
        read,
        transform=options.transform,
        damping=options.damping,
        center_keys=options.center_keys,
    )
    return CalibrateResult(record, statistics, warnings)


def write_calibration(
    folder: Path,
    model: Any,
    statistics: Statistics,
    read: TextRecord,
    transform: str = "wush",
    damping: float = DAMPING,
    center_keys: bool = True,
) -> CalibrationRecord:
    """Make transforms from statistics and write them with what they are for.

    Args:
        folder: Of the calibration.
        model: Of transformers, whose statistics these are.
        statistics: Of a text.
        read: About the text; its seed is that of random rotations, too.
        transform: One of `build.TRANSFORMS`.
        damping: See `transforms.wush`.
        center_keys: See `build.build_transforms`.

    """
    shape = ModelShape.of(model.config)
    transforms = build_transforms(
        transform, statistics, damping, read.seed, center_keys
    )
    record = CalibrationRecord(
        format_version=FORMAT_VERSION,
        model=shape,
        weights=[
            model_digests(module, shape.head_dim) for module in attention_modules(model)
        ],
        text=read,
        transform=transform,
        center_keys=center_keys,
        damping=damping,
        hadamard_blocks=list(power_blocks(shape.head_dim)),
        **_conditions(transforms),
        rank_deficient=[
            f"layer {layer}, KV head {head}, {name}"
            for layer, head, name in statistics.rank_deficient()
        ],
        versions={"polykv-vllm": __version__} | {n: version(n) for n in _LIBRARIES},
        tensors="",
    )
    return save_calibration(folder, record, *transforms)


def _conditions(transforms: Transforms) -> dict[str, list[list[float]]]:
    pairs = {"key": transforms.key, "value": transforms.value}
    return {
        f"{name}_condition": condition_numbers(each.float()).tolist()
        for name, each in pairs.items()
    }


def _warnings(
    options: CalibrateOptions, length: int, statistics: Statistics
) -> list[str]:
    found = []
    if statistics.sequences < options.sequences:
        found.append(
            f"the text has {statistics.sequences} sequences of "
            f"{length} tokens; {options.sequences} were asked for"
        )
    if poor := statistics.rank_deficient():
        layer, head, name = poor[0]
        found.append(
            f"{len(poor)} statistics have not full rank (the first: layer {layer}, KV "
            f"head {head}, {name}): the text is too short, or channels are always "
            f"zero; damping {options.damping:g} stands in for what was not seen"
        )
    return found
