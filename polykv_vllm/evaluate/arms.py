# SPDX-License-Identifier: Apache-2.0
"""The engines that are compared: a cache, a model dtype, what its tokens go through."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.formats import CACHE_DTYPES
from polykv_vllm.keys.transform import TREATMENTS
from polykv_vllm.windows.sizes import (
    RECOMMENDED_WINDOWS,
    WINDOWS,
    WindowError,
    WindowSizes,
)

REFERENCE = "bf16"
"""The arm that all others are compared with."""

AUTO = "auto"
NONE = "none"
CALIBRATED = "calibrated"
_SEPARATOR = "+"


@dataclass(frozen=True)
class Arm:
    """One engine.

    Attributes:
        name: In tables and files.
        kv_cache_dtype: Value of `--kv-cache-dtype`; "auto" is vLLM's own cache in the
            model's dtype.
        dtype: Of the model's weights and activations.
        key_treatment: One of `TREATMENTS`, or "auto": what the engine chooses.
        calibration: Folder of `polykv calibrate`; "none": without, also where the
            model's own folder has one.
        windows: Tokens that are seen in full precision; None for none.

    """

    name: str
    kv_cache_dtype: str
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    key_treatment: str = AUTO
    calibration: str = NONE
    windows: WindowSizes | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the cache is one of our formats."""
        return self.kv_cache_dtype in CACHE_DTYPES

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the model's dtype."""
        return {"float32": 4, "bfloat16": 2}[self.dtype]

    @property
    def is_reference(self) -> bool:
        """Whether the others are compared with this one."""
        return self.name == REFERENCE

    @property
    def additional_config(self) -> dict[str, dict[str, Any]]:
        """What vLLM's option of that name has to say; empty for vLLM's own cache."""
        if not self.is_ours:
            return {}
        options: dict[str, Any] = {"calibration": self.calibration}
        if self.key_treatment != AUTO:
            options["key_treatment"] = self.key_treatment
        if self.windows is not None:
            options["windows"] = self.windows.option
        return {"polykv": options}


_WINDOWS = WindowSizes(*RECOMMENDED_WINDOWS)
_STOCK = {
    arm.name: arm
    for arm in (
        Arm(REFERENCE, AUTO),
        Arm("fp32", AUTO, "float32"),
        Arm("fp8", "fp8"),
    )
}


def parse_arm(
    text: str,
    calibration: Path | None = None,
    windows: WindowSizes = _WINDOWS,
) -> Arm:
    """Return the arm that `text` names.

    `bf16`, `polykv_k7v4`, `polykv+hadamard`, `polykv+calibrated`, `polykv_k2v2+windows`
    or, with sizes of its own, `polykv_k2v2+windows16-128`; several after another, too.

    Args:
        text: Name of the arm.
        calibration: Folder for arms that are `calibrated`.
        windows: Of arms that have `windows`. The arm's name then has them.

    Raises:
        EvalError: No such arm or treatment, or no calibration; the message lists those
            there are.

    """
    base, *suffixes = text.split(_SEPARATOR)
    if base not in _STOCK and base not in CACHE_DTYPES:
        known = ", ".join((*_STOCK, *CACHE_DTYPES))
        raise EvalError(f"there is no arm {text!r}; there are: {known}")
    if not suffixes:
        return _STOCK.get(base) or Arm(base, base)
    if base in _STOCK:
        raise EvalError(
            f"arm {text!r}: vLLM's own cache takes no key treatment, no calibration, "
            f"no windows; {', '.join(CACHE_DTYPES)} do"
        )
    sizes = _take_windows(suffixes, windows)
    folder = NONE
    if CALIBRATED in suffixes:
        if calibration is None:
            raise EvalError(f"arm {text!r} needs a calibration: --calibration DIR")
        suffixes.remove(CALIBRATED)
        folder = str(calibration.absolute())
    treatment = suffixes.pop(0) if suffixes else AUTO
    if suffixes or treatment not in (AUTO, *TREATMENTS):
        wrong = _SEPARATOR.join((*suffixes, treatment))
        raise EvalError(
            f"arm {text!r}: there is no key treatment {wrong!r}; there are: "
            f"{', '.join(TREATMENTS)}, and without a suffix the engine chooses"
        )
    if sizes is not None:
        found = next(part for part in text.split(_SEPARATOR) if _is_windows(part))
        exact = f"{WINDOWS}{sizes.sink_tokens}-{sizes.recent_tokens}"
        text = text.replace(found, exact)
    return Arm(text, base, key_treatment=treatment, calibration=folder, windows=sizes)


def _is_windows(suffix: str) -> bool:
    return suffix.startswith(WINDOWS)


def _take_windows(suffixes: list[str], windows: WindowSizes) -> WindowSizes | None:
    """Return the sizes that a suffix names, which is taken out; None without one."""
    found = [suffix for suffix in suffixes if _is_windows(suffix)]
    if not found:
        return None
    suffixes.remove(found[0])
    try:
        return WindowSizes.of_arm(found[0], windows)
    except WindowError as error:
        raise EvalError(str(error)) from None


def parse_arms(
    text: str,
    calibration: Path | None = None,
    windows: WindowSizes = _WINDOWS,
) -> list[Arm]:
    """Return the arms of a comma-separated list, each once, the reference first.

    The reference is there whether or not it is named: without it nothing can be
    compared.

    Raises:
        EvalError: As `parse_arm`.

    """
    names = [name.strip() for name in text.split(",")]
    arms = [
        parse_arm(name, calibration, windows)
        for name in (REFERENCE, *filter(None, names))
    ]
    return list({arm.name: arm for arm in arms}.values())
