# SPDX-License-Identifier: Apache-2.0
"""What is to be measured: the YAML files of `scenarios/`, or a user's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from polykv_vllm.bench.arms import arm_named
from polykv_vllm.bench.errors import BenchError
from polykv_vllm.models import DEFAULT_MODEL

Agents = Annotated[int, Field(ge=1, le=4096)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Nested(_Strict):
    """The shared prompt is an organisation's; its end belongs to one of the teams."""

    teams: Annotated[int, Field(ge=2, description="teams of a group")]
    team_tokens: PositiveInt = Field(description="last part of the shared prompt")


class MemoryFigure(_Strict):
    """Memory of one shared document while 1, 2, ... agents read it."""

    agents: PositiveInt = Field(default=15, description="the largest number")
    shared_tokens: PositiveInt = Field(default=3072, description="of the document")


class Distinct(_Strict):
    """How many agents with a document of their own run without preemption."""

    document_tokens: PositiveInt = 2048
    at_least: float | None = Field(
        default=None, gt=0, description="times stock's agents that polykv must run"
    )


class Bar(_Strict):
    """A ratio of decode throughput that the project requires of `polykv`."""

    agents: PositiveInt
    shared_tokens: PositiveInt
    over: str = Field(description="the arm it is compared with")
    at_least: float = Field(gt=0)


class Scenario(_Strict):
    """One scenario file: cases are agents x shared_tokens, each run in every arm."""

    about: str = ""
    model: str = DEFAULT_MODEL
    arms: list[str] = Field(min_length=1)
    agents: list[Agents] = Field(min_length=1)
    shared_tokens: list[PositiveInt] = []
    prompts_dir: Path | None = None
    own_tokens: PositiveInt = 64
    output_tokens: Annotated[int, Field(ge=2)] = 64
    groups: PositiveInt = 1
    nested: Nested | None = None
    cache_mib: PositiveInt = 1024
    block_size: PositiveInt = 128
    max_num_batched_tokens: PositiveInt = 2048
    threads: PositiveInt = 1
    repetitions: PositiveInt = 3
    memory_figure: MemoryFigure | None = None
    distinct: Distinct | None = None
    bars: list[Bar] = []
    serve_args: list[str] = []

    @model_validator(mode="after")
    def _fits_together(self) -> "Scenario":
        for name in self.arms:
            arm_named(name)  # ValueError that names what exists
        if len(set(self.arms)) < len(self.arms):
            raise ValueError(f"arms: {self.arms} names one twice")
        if (self.prompts_dir is None) == (not self.shared_tokens):
            raise ValueError(
                "give either shared_tokens (synthetic prompts of these lengths) or "
                "prompts_dir (real prompts of their own lengths)"
            )
        if self.prompts_dir is not None and (self.nested or self.groups > 1):
            raise ValueError("groups and nested are for synthetic prompts only")
        if self.nested and self.nested.team_tokens >= min(self.shared_tokens):
            raise ValueError(
                f"nested: team_tokens {self.nested.team_tokens} leave nothing of "
                f"shared_tokens {min(self.shared_tokens)} to the organisation"
            )
        return self

    def cases(self) -> list["Case"]:
        """Return the cases, the smallest first."""
        lengths: list[int | None] = [*sorted(self.shared_tokens)] or [None]
        return [Case(n, t) for t in lengths for n in sorted(self.agents)]


@dataclass(frozen=True)
class Case:
    """One cell of the matrix.

    Attributes:
        agents: Requests at once.
        shared_tokens: Length of the shared prompt; None for prompts of a folder.

    """

    agents: int
    shared_tokens: int | None

    @property
    def name(self) -> str:
        """For file names and tables: agents x shared tokens."""
        return f"{self.agents}x{self.shared_tokens or 'prompts'}"


def shipped() -> dict[str, str]:
    """Return the scenarios of the package: name to what they are about."""
    return {
        path.stem: yaml.safe_load(path.read_text())["about"]
        for path in sorted(_shipped_folder().glob("*.yaml"))
    }


def _shipped_folder() -> Path:
    return Path(__file__).parent / "scenarios"


def load_scenario(
    name_or_path: str, overrides: Mapping[str, Any] | None = None
) -> Scenario:
    """Read a scenario of the package or a user's file.

    Args:
        name_or_path: A name of `shipped()`, or a path that ends in .yaml or .yml.
        overrides: Keys that replace the file's.

    Raises:
        BenchError: There is no such scenario, the file is no YAML mapping, or a key is
            unknown or has a value that is not allowed; it names the key.

    """
    path = Path(name_or_path)
    if name_or_path in shipped():
        path = _shipped_folder() / f"{name_or_path}.yaml"
    elif path.suffix not in (".yaml", ".yml"):
        raise BenchError(
            f"there is no scenario {name_or_path!r}; there are: "
            f"{', '.join(shipped())}, or a path to a .yaml file of yours"
        )
    try:
        text = path.read_text()
    except OSError as error:
        raise BenchError(f"scenario {path}: {error.strerror}") from error
    return parse_scenario(text, name_or_path, path.parent, overrides)


def parse_scenario(
    text: str,
    source: str,
    folder: Path = Path(),
    overrides: Mapping[str, Any] | None = None,
) -> Scenario:
    """Read a scenario from YAML; `folder` is what its relative paths start from."""
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BenchError(f"scenario {source} is no YAML: {error}") from error
    if not isinstance(given, dict):
        raise BenchError(f"scenario {source} must be a mapping of keys to values")
    given |= dict(overrides or {})
    if isinstance(given.get("prompts_dir"), str):
        given["prompts_dir"] = folder / Path(given["prompts_dir"]).expanduser()
    try:
        return Scenario.model_validate(given)
    except ValidationError as error:
        reasons = "\n".join(f"  {_explain(item)}" for item in error.errors())
        raise BenchError(f"scenario {source}:\n{reasons}") from None


def _explain(error: Any) -> str:
    path = [part for part in error["loc"] if isinstance(part, str)]
    where = ".".join(map(str, error["loc"]))
    if error["type"] != "extra_forbidden":
        message = error["msg"].removeprefix("Value error, ")
        return f"{where}: {message} (given: {error['input']!r})" if where else message
    fields = _model_of(path[:-1]).model_fields
    return f"{where}: there is no such key; there are: {', '.join(fields)}"


def _model_of(path: list[str]) -> type[BaseModel]:
    """Return the model whose keys stand below `path`."""
    inner: dict[str, type[BaseModel]] = {
        "nested": Nested,
        "memory_figure": MemoryFigure,
        "distinct": Distinct,
        "bars": Bar,
    }
    return inner[path[-1]] if path else Scenario
