# SPDX-License-Identifier: Apache-2.0
"""Real models for the demo and the tests, built from Python packages."""

from polykv_vllm.models.build import (
    ModelBuildError,
    build_model,
    built_model,
    resolve_model,
)
from polykv_vllm.models.catalog import DEFAULT_MODEL, MODELS, ModelRecipe

__all__ = [
    "DEFAULT_MODEL",
    "MODELS",
    "ModelBuildError",
    "ModelRecipe",
    "build_model",
    "built_model",
    "resolve_model",
]
