# SPDX-License-Identifier: Apache-2.0
"""Options under `"pool"` of ours in `--additional-config`."""

from pydantic import BaseModel, ConfigDict, Field


class PoolConfig(BaseModel):
    """The prefix pool: what is kept beyond vLLM's own prefix cache."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: str | None = Field(
        default=None,
        min_length=1,
        description="directory where full blocks are kept, compressed as they are, "
        "and found again after a restart; null keeps nothing on disk",
    )
    max_bytes: int = Field(
        default=16 << 30,
        ge=1 << 20,
        description="what the blocks of all workers may take on disk; beyond that the "
        "ones longest unused go",
    )
    pinned_share: float = Field(
        default=0.5,
        ge=0.0,
        le=1.0,
        strict=False,
        description="the part of the cache in memory that pins may hold at most; one "
        "request of max_model_len always fits beside them",
    )
    prefixes: str | None = Field(
        default=None,
        min_length=1,
        description="YAML or JSON file of prefixes that are computed and pinned when "
        "the server starts",
    )
