# SPDX-License-Identifier: Apache-2.0
"""Retrieval and tasks: questions with one right answer, from local files."""

from polykv_vllm.evaluate.tasks.needle import NeedleSuite
from polykv_vllm.evaluate.tasks.questions import Gsm8kSuite, JsonlSuite
from polykv_vllm.evaluate.tasks.retrieval import KeyValueSuite, LinesSuite, RulerSuite
from polykv_vllm.evaluate.tasks.suite import TaskSuite

TASKS: dict[str, type[TaskSuite]] = {
    suite.name: suite
    for suite in (
        NeedleSuite,
        KeyValueSuite,
        LinesSuite,
        RulerSuite,
        Gsm8kSuite,
        JsonlSuite,
    )
}
"""The tasks by the name that `--suite` takes."""
