# SPDX-License-Identifier: Apache-2.0
"""Options under `--additional-config '{"polykv": {...}}'`."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polykv_vllm.errors import OptionError
from polykv_vllm.pool.options import PoolConfig
from polykv_vllm.windows.sizes import RECOMMENDED_WINDOWS, WindowSizes

OPTIONS_KEY = "polykv"


class WindowConfig(BaseModel):
    """Tokens that are also held in the model's dtype and attended in full precision."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    sink_tokens: int = Field(
        default=RECOMMENDED_WINDOWS[0],
        ge=0,
        description="first tokens of a sequence",
    )
    recent_tokens: int = Field(
        default=RECOMMENDED_WINDOWS[1],
        ge=0,
        description="last tokens before and with the one that attends",
    )
    max_sequences: int | None = Field(
        default=None,
        ge=1,
        description="sequences that run at once, each of which has windows; null is "
        "--max-num-seqs, or fewer where they would take over a quarter of the cache "
        "memory",
    )

    @property
    def is_used(self) -> bool:
        """Whether any token is seen in full precision."""
        return self.sink_tokens > 0 or self.recent_tokens > 0

    def sizes(self, draft_tokens: int = 0) -> WindowSizes:
        """Return the sizes of the windows of an engine that speculates so far."""
        return WindowSizes(self.sink_tokens, self.recent_tokens, draft_tokens)


class PolyKVConfig(BaseModel):
    """What can be chosen beside the format, which `--kv-cache-dtype` names."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    isa: Literal[
        "auto",
        "amx",
        "avx512",
        "avx512bw",
        "avxvnni",
        "avx2",
        "neon_i8mm",
        "neon",
        "scalar",
        "reference",
    ] = Field(
        default="auto",
        description="CPU instruction set of the kernels; auto takes the fastest "
        "that this CPU has, reference computes in plain torch (slow, for checks)",
    )
    prefix_sharing: bool = Field(
        default=True,
        description="read cached blocks that several requests of a batch share once "
        "for all of them; the results are the same bits either way",
    )
    fast_arithmetic: bool = Field(
        default=False,
        description="round attention probabilities to 8 bits instead of 16: faster, "
        "with a relative error of attention up to 1e-2 instead of 3e-3",
    )
    key_treatment: Literal[
        "auto", "none", "channel_scale", "hadamard", "channel_scale_hadamard"
    ] = Field(
        default="auto",
        description="what keys go through before they are quantized; auto is "
        "channel_scale_hadamard, its scales from the model's weights, and hadamard "
        "where those cannot be read",
    )
    single_copy: bool = Field(
        default=True,
        description="keep one physical copy of a prompt's blocks also when requests "
        "that share them arrive together: one computes them, the others wait for it",
    )
    calibration: str = Field(
        default="auto",
        min_length=1,
        description="folder that polykv calibrate has written, whose transforms of "
        "values are folded into the weights; auto takes MODEL/polykv where it is "
        "there, none takes no calibration",
    )
    windows: WindowConfig | None = Field(
        default=None,
        description="first and last tokens of a sequence that are attended in full "
        "precision (docs/windows.md); null: none",
    )
    pool: PoolConfig = Field(
        default=PoolConfig(),
        description="blocks on disk and pinned prefixes (docs/pool.md)",
    )


_MAPPINGS: dict[str, type[BaseModel]] = {"windows": WindowConfig, "pool": PoolConfig}


def parse_options(additional_config: Any) -> PolyKVConfig:
    """Read and validate our part of vLLM's `additional_config`.

    Args:
        additional_config: The engine's; anything but a mapping has no part of ours.

    Raises:
        OptionError: Names the key, its value and what is allowed.

    """
    if not isinstance(additional_config, Mapping):
        return PolyKVConfig()
    given = additional_config.get(OPTIONS_KEY, {})
    if not isinstance(given, Mapping):
        raise OptionError(
            f"additional_config[{OPTIONS_KEY!r}] must be a mapping of options, not "
            f"{given!r}; options: {describe_options()}"
        )
    try:
        return PolyKVConfig.model_validate(dict(given))
    except ValidationError as error:
        raise OptionError("; ".join(map(_explain, error.errors()))) from None


def describe_options() -> str:
    """List the options with their allowed values."""
    return ", ".join(f"{name} ({_allowed(name)})" for name in PolyKVConfig.model_fields)


def key_treatments() -> tuple[str, ...]:
    """Return what `key_treatment` may be, the default first."""
    return get_args(PolyKVConfig.model_fields["key_treatment"].annotation)


def _allowed(name: str) -> str:
    if name in _MAPPINGS:
        return _describe_mapping(name)
    choices = _choices(name)
    return f"one of {', '.join(choices)}" if choices else "a folder, 'auto' or 'none'"


def _describe_mapping(name: str) -> str:
    names = ", ".join(_MAPPINGS[name].model_fields)
    return f"a mapping of {names}; see docs/{name}.md"


def _choices(name: str) -> list[str]:
    """Return what a closed option may be; nothing for one that takes any text."""
    annotation = PolyKVConfig.model_fields[name].annotation
    if annotation is bool:
        return ["true", "false"]
    return [repr(value) for value in get_args(annotation)]


def _explain(error: Any) -> str:
    name = ".".join(map(str, error["loc"]))
    where = f"additional_config[{OPTIONS_KEY!r}][{name!r}] = {error['input']!r}"
    if error["type"] == "extra_forbidden":
        return f"{where}: there is no such option; options: {describe_options()}"
    if (option := name.partition(".")[0]) in _MAPPINGS:
        return f"{where}: {error['msg']}; {option} is {_describe_mapping(option)}"
    allowed = ", ".join(_choices(name)) or _allowed(name)
    return f"{where}: not allowed; allowed: {allowed}"
