# SPDX-License-Identifier: Apache-2.0
"""Speed and memory beside vLLM's own cache; run with `python -m benchmarks.<name>`.

Every benchmark checks its results first, alternates its arms in one run, and prints
medians with their spread. README.md has the questions and the commands.
"""
