# SPDX-License-Identifier: Apache-2.0
"""The suites there are."""

from polykv_vllm.evaluate.document import DocumentSuite
from polykv_vllm.evaluate.errors import EvalError
from polykv_vllm.evaluate.perplexity import PerplexitySuite
from polykv_vllm.evaluate.suite import Suite
from polykv_vllm.evaluate.tasks import TASKS

_ALL: tuple[type[Suite], ...] = (PerplexitySuite, DocumentSuite, *TASKS.values())
SUITES: dict[str, type[Suite]] = {suite.name: suite for suite in _ALL}
"""By name, in the order of a report."""


def suites_named(text: str) -> list[type[Suite]]:
    """Return the suites of a comma-separated list, each once.

    Raises:
        EvalError: There is none of that name; the message lists those there are.

    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SUITES:
            raise EvalError(
                f"there is no suite {name!r}; there are: {', '.join(SUITES)}"
            )
    return [SUITES[name] for name in dict.fromkeys(names)]
