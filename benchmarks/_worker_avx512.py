# SPDX-License-Identifier: Apache-2.0
"""The worker of the arm "stock without AMX"; importing it changes this process."""

from benchmarks._worker import BenchmarkWorker
from polykv_vllm.bench.workers.without_amx import WithoutAmx


class Avx512Worker(WithoutAmx, BenchmarkWorker):
    """`BenchmarkWorker` in a process whose attention takes the general path."""
