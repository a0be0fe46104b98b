# SPDX-License-Identifier: Apache-2.0
"""What a calibration leaves: transforms, and all that they were made for.

    DIR/calibration.safetensors    the transforms, fp32
    DIR/calibration.json           a `CalibrationRecord`

Nothing of it is used without a check: against the record, and against the model.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from polykv_vllm.calibrate.errors import CalibrationError
from polykv_vllm.calibrate.shape import ModelShape
from polykv_vllm.calibrate.transforms import inverse
from polykv_vllm.keys import KeyTransform
from polykv_vllm.reporting.files import write_json

FORMAT_VERSION: Final = 2
RECORD_FILE, TENSOR_FILE = "calibration.json", "calibration.safetensors"
MODEL_FOLDER = "polykv"
"""Where a model's own folder holds its calibration."""

_MATRICES = ("key_transform", "value_transform")
_TENSORS = (*_MATRICES, "key_center")
_LARGEST_ERROR = 1e-6
"""Of T T^-1 - I, in fp64: beyond it T has no usable inverse."""


class TextRecord(BaseModel):
    """The text that was read.

    Attributes:
        digest: Of the text of all files.
        files: Their names.
        sequences: That were read.
        tokens: Of all sequences.
        seed: Of the choice of sequences.

    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: str
    files: list[str]
    sequences: int
    tokens: int
    seed: int


class CalibrationRecord(BaseModel):
    """What the transforms of a calibration were made for, and how.

    Attributes:
        format_version: Of both files.
        model: Config of the model.
        weights: A digest by layer and KV head (`weights.head_digests`).
        text: What was read.
        transform: A name of `build.TRANSFORMS`, or of a sensitivity's.
        center_keys: Whether the mean key is subtracted from every key first.
        damping: See `transforms.wush`.
        hadamard_blocks: Sizes of the Hadamard matrices in the transforms; more than one
            is the block-diagonal variant of a head size that is no power of two.
        key_condition: Condition number of T by layer and KV head.
        value_condition: Likewise.
        rank_deficient: Statistics without full rank, as "layer 3, KV head 1, value".
        versions: Of the libraries.
        tensors: Digest of the file with the transforms.

    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[2]
    model: ModelShape
    weights: list[list[str]]
    text: TextRecord
    transform: str
    center_keys: bool
    damping: float
    hadamard_blocks: list[int]
    key_condition: list[list[float]]
    value_condition: list[list[float]]
    rank_deficient: list[str]
    versions: dict[str, str]
    tensors: str


class LayerCalibration(NamedTuple):
    """Transforms of one layer; `[num_kv_heads, head_dim, head_dim]` fp64.

    Attributes:
        key: T_K: a row k is stored as `(k - key_center) @ key.mT`.
        key_inverse: T_K^-1: a row q meets the cache as `q @ key_inverse`.
        value: T_V: a row v is stored as `v @ value.mT`.
        value_inverse: T_V^-1: a row o of the output becomes `o @ value_inverse.mT`.
        key_center: `[num_kv_heads, head_dim]` fp32; None where keys are not centred.

    """

    key: torch.Tensor
    key_inverse: torch.Tensor
    value: torch.Tensor
    value_inverse: torch.Tensor
    key_center: torch.Tensor | None

    @property
    def key_transform(self) -> KeyTransform:
        """What keys and queries go through at run time."""
        return KeyTransform(matrices=self.key, centers=self.key_center)


@dataclass(frozen=True, eq=False)
class Calibration:
    """A checked calibration.

    Attributes:
        path: Its folder.
        record: What it is for.
        key: `[num_layers, num_kv_heads, head_dim, head_dim]` fp32.
        value: Likewise.
        key_center: `[num_layers, num_kv_heads, head_dim]` fp32; zeros where keys are
            not centred.

    """

    path: Path
    record: CalibrationRecord
    key: torch.Tensor
    value: torch.Tensor
    key_center: torch.Tensor

    @property
    def digest(self) -> str:
        """Names the transforms, for the identity of cached bytes."""
        return self.record.tensors

    def layer(self, index: int, heads: Sequence[int] | None = None) -> LayerCalibration:
        """Return the transforms of a layer.

        Args:
            index: Number of the layer.
            heads: KV heads that a rank has; None for all.

        """
        chosen = slice(None) if heads is None else list(heads)
        key, value = (each[index][chosen].double() for each in (self.key, self.value))
        center = self.key_center[index][chosen] if self.record.center_keys else None
        return LayerCalibration(key, inverse(key), value, inverse(value), center)

    def key_transforms(self) -> list[KeyTransform]:
        """Return what keys and queries of each layer go through, for all KV heads."""
        layers = range(self.record.model.num_layers)
        return [self.layer(index).key_transform for index in layers]

    def check_model(self, shape: ModelShape) -> None:
        """Raise CalibrationError unless the calibration is of such a model."""
        if found := shape.differences(self.record.model):
            raise CalibrationError(
                f"{self.path} was made for another model. The served model has "
                f"{'; '.join(found)}. Calibrate this one: polykv calibrate MODEL"
            )

    def check_heads(self, layer: int, heads: Sequence[int], found: list[str]) -> None:
        """Compare the weights of a layer with those that were calibrated.

        Args:
            layer: Number of the layer.
            heads: KV heads that `found` is of.
            found: Their digests.

        Raises:
            CalibrationError: They are others; names layer and head.

        """
        for head, digest in zip(heads, found, strict=True):
            if self.record.weights[layer][head] != digest:
                raise CalibrationError(
                    f"{self.path / RECORD_FILE}: layer {layer}, KV head {head}: the "
                    "calibration was made from other weights than the served ones. "
                    "Calibrate these: polykv calibrate MODEL"
                )


def save_calibration(
    folder: Path,
    record: CalibrationRecord,
    key: torch.Tensor,
    value: torch.Tensor,
    key_center: torch.Tensor,
) -> CalibrationRecord:
    """Write a calibration; the record gets the digest of the transforms' file.

    Args:
        folder: Made if it is not there.
        record: Its `tensors` is replaced.
        key: `[num_layers, num_kv_heads, head_dim, head_dim]`, rounded to fp32.
        value: Likewise.
        key_center: `[num_layers, num_kv_heads, head_dim]`, likewise.

    Raises:
        CalibrationError: The transforms are not such as could be loaded.

    """
    found = (each.float() for each in (key, value, key_center))
    tensors = dict(zip(_TENSORS, found, strict=True))
    target = folder / TENSOR_FILE
    _check_tensors(target, tensors, record.model)
    folder.mkdir(parents=True, exist_ok=True)
    # The record goes last and names the file's digest: a torn pair is refused.
    temporary = target.with_suffix(".tmp")
    save_file({name: each.contiguous() for name, each in tensors.items()}, temporary)
    temporary.replace(target)
    record = record.model_copy(update={"tensors": _file_digest(target)})
    write_json(folder / RECORD_FILE, record.model_dump())
    return record


def load_calibration(folder: Path) -> Calibration:
    """Read and check a calibration.

    Raises:
        CalibrationError: A file is missing, torn, of another format version, or has
            numbers that are no transforms; names file, layer and head.

    """
    record = load_record(folder)
    path = folder / TENSOR_FILE
    try:
        found = _file_digest(path)
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CalibrationError(f"{path} cannot be read: {error}") from error
    if set(tensors) != set(_TENSORS):
        raise CalibrationError(
            f"{path} holds {', '.join(sorted(tensors)) or 'nothing'}; expected: "
            f"{', '.join(_TENSORS)}"
        )
    _check_tensors(path, tensors, record.model)
    if found != record.tensors:
        raise CalibrationError(
            f"{path} is not the file that {folder / RECORD_FILE} describes (digest "
            f"{found}, not {record.tensors}): calibrate again"
        )
    return Calibration(folder, record, *(tensors[name] for name in _TENSORS))


def load_record(folder: Path) -> CalibrationRecord:
    """Read the record alone.

    Raises:
        CalibrationError: It cannot be read, or is of another format version.

    """
    path = folder / RECORD_FILE
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise CalibrationError(
            f"{path}: {error.strerror}; a calibration is made by polykv calibrate"
        ) from error
    except ValueError as error:
        raise CalibrationError(f"{path} is no JSON: {error}") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise CalibrationError(
            f"{path} has format version {version}; this polykv-vllm reads "
            f"{FORMAT_VERSION}: calibrate again"
        )
    try:
        record = CalibrationRecord.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CalibrationError(f"{path}: {where}: {first['msg']}") from error
    shape = [len(record.weights), *{len(layer) for layer in record.weights}]
    if shape != [record.model.num_layers, record.model.num_kv_heads]:
        raise CalibrationError(
            f"{path}: digests of {shape} layers and KV heads, the model has "
            f"{[record.model.num_layers, record.model.num_kv_heads]}"
        )
    return record


def _check_tensors(
    path: Path, tensors: dict[str, torch.Tensor], model: ModelShape
) -> None:
    """Raise CalibrationError unless all are transforms of such a model."""
    for name in _TENSORS:
        tensor, sizes = tensors[name], 2 if name in _MATRICES else 1
        expected = [model.num_layers, model.num_kv_heads, *[model.head_dim] * sizes]
        if list(tensor.shape) != expected or tensor.dtype != torch.float32:
            axes = ["layers", "KV heads", *["head size"] * sizes]
            raise CalibrationError(
                f"{path}: {name} is {list(tensor.shape)} in {tensor.dtype}; expected "
                f"[{', '.join(axes)}] = {expected} in torch.float32"
            )
        finite = tensor.isfinite().flatten(2).all(-1)
        _refuse(path, name, ~finite, "has numbers that are not finite")
    for name in _MATRICES:
        _check_inverses(path, name, tensors[name])


def _check_inverses(path: Path, name: str, tensor: torch.Tensor) -> None:
    _refuse(path, name, (tensor == 0).all(-1).all(-1), "is all zeros")
    inverses, failed = torch.linalg.inv_ex(tensor.double())
    eye = torch.eye(tensor.shape[-1], dtype=torch.float64)
    error = (tensor.double() @ inverses - eye).abs().amax((-2, -1))
    bad = (failed != 0) | ~(error < _LARGEST_ERROR)
    _refuse(path, name, bad, "has no inverse")


def _refuse(path: Path, name: str, bad: torch.Tensor, why: str) -> None:
    places = bad.nonzero().tolist()
    if places:
        layer, head = places[0]
        others = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
        raise CalibrationError(
            f"{path}: {name} of layer {layer}, KV head {head}{others} {why}"
        )


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
