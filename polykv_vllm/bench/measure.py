# SPDX-License-Identifier: Apache-2.0
"""What is done with a running server: one function for each kind of run."""

import math
from typing import Any

from polykv_vllm.bench.client import BenchClient
from polykv_vllm.bench.errors import RunError
from polykv_vllm.bench.figures import Phase, distinct_agents, phase_of
from polykv_vllm.bench.pool import reset_prefix_cache
from polykv_vllm.bench.sampler import LoadSampler, peak_usage_by_running
from polykv_vllm.bench.scenario import Case, Scenario
from polykv_vllm.bench.workload import Prompt, Workload, needed_blocks
from polykv_vllm.scrape import (
    cache_report,
    engine_load,
    prefix_counters,
    sharing_counters,
)
from polykv_vllm.server import VllmServer

COLD, WARM = "cold", "warm"
_DISTINCT_OUTPUT_TOKENS = 32
_RAMP_RATES = (2.0, 6.0, 15.0)  # requests per second
_WARM_UP_TOKENS = 300
_DEATH_S = 10.0  # what a dying server may take to end


class Bench:
    """Runs requests of one scenario against a server."""

    def __init__(
        self, scenario: Scenario, workload: Workload, client: BenchClient
    ) -> None:
        self._scenario = scenario
        self._workload = workload
        self._client = client

    def warm_up(self, server: VllmServer) -> None:
        """Have the engine compute batches as they will come, once, unmeasured.

        The first batch of a shape is slow: buffers grow, oneDNN prepares its kernels.
        """
        agents = max(self._scenario.agents)
        prompts = self._workload.documents(agents, _WARM_UP_TOKENS, seed=1)
        self._run(server, prompts, 3)

    def speed(
        self, server: VllmServer, case: Case, repetition: int
    ) -> dict[str, dict[str, Any]]:
        """Return the figures of a cold wave and of a warm one.

        In the warm wave the agents' own parts are new; what they share is cached.

        Raises:
            RunError: The case does not fit the cache, or a request failed.

        """
        report = cache_report(server.metrics())
        needed = needed_blocks(self._workload, case, self._scenario)
        if needed > report.num_blocks - 1:
            mib = math.ceil(self._scenario.cache_mib * needed / report.num_blocks)
            raise RunError(
                f"case {case.name} needs {needed} blocks, {self._scenario.cache_mib} "
                f"MiB hold {report.num_blocks - 1}: set cache_mib to {mib} or more"
            )
        reset_prefix_cache(server)
        phases = {}
        for phase in (COLD, WARM):
            prompts = self._workload.prompts(case, phase, repetition)
            phases[phase] = self._wave(server, prompts).as_dict()
        return phases

    def _wave(self, server: VllmServer, prompts: list[Prompt]) -> Phase:
        tokens = self._scenario.output_tokens
        before = server.metrics()
        record = self._run(server, prompts, tokens)
        after = server.metrics()
        return phase_of(
            record,
            requested_output_tokens=tokens * len(prompts),
            prefix=prefix_counters(after) - prefix_counters(before),
            preemptions=engine_load(after).preemptions
            - engine_load(before).preemptions,
            shared_rate=(
                sharing_counters(after) - sharing_counters(before)
            ).shared_rate,
        )

    def memory(self, server: VllmServer) -> dict[str, Any]:
        """Measure the blocks in use while 1, 2, ... agents read one document.

        The agents join one after the other; the engine's own figures say how many run
        and how many blocks they hold. An agent's own tokens and its answer fill one
        block, so what is left of the blocks in use holds the document.

        Returns:
            `blocks_in_use` and `document_blocks` by number of agents.

        """
        figure = self._scenario.memory_figure
        assert figure is not None, "the scenario has no memory figure"
        report = cache_report(server.metrics())
        used: dict[int, int] = {}
        for rate in _RAMP_RATES:
            for agents, share in self._ramp(server, rate).items():
                blocks = round(share * (report.num_blocks - 1))
                used[agents] = max(used.get(agents, 0), blocks)
            if set(used) >= set(range(1, figure.agents + 1)):
                break
        else:
            missing = sorted(set(range(1, figure.agents + 1)) - set(used))
            raise RunError(
                f"{', '.join(map(str, missing))} agents were never seen at the same "
                "time: this machine is too slow or too fast for the memory figure"
            )
        return {
            "shared_tokens": figure.shared_tokens,
            "blocks_in_use": {str(n): used[n] for n in sorted(used)},
            "document_blocks": {str(n): used[n] - n for n in sorted(used)},
        }

    def _ramp(self, server: VllmServer, rate: float) -> dict[int, float]:
        figure = self._scenario.memory_figure
        assert figure is not None
        own = self._scenario.block_size // 4
        output = self._scenario.block_size - own
        prompts = self._workload.shared_document(
            figure.agents + 1, figure.shared_tokens, own
        )
        reset_prefix_cache(server)
        self._run(server, prompts[:1], 2)  # caches the document
        with LoadSampler(server) as sampler:
            self._run(server, prompts[1:], output, rate)
        return peak_usage_by_running(sampler.samples)

    def distinct(self, server: VllmServer) -> dict[str, Any]:
        """Find how many agents with documents of their own run at the same time.

        The number that the engine's blocks allow is tried, and one more.

        Returns:
            `computed`, and `measured`: the largest number that ran all at once and
            without preemption; `tried` has what was seen.

        """
        tokens = self._scenario.distinct
        assert tokens is not None, "the scenario has no distinct documents"
        report = cache_report(server.metrics())
        computed = distinct_agents(
            report.num_blocks,
            report.block_size,
            tokens.document_tokens + _DISTINCT_OUTPUT_TOKENS,
        )
        tried: dict[int, dict[str, int]] = {}
        agents = computed + 1
        while agents > 0:
            tried[agents] = self._try_distinct(server, agents, tokens.document_tokens)
            if tried[agents]["together"]:
                break
            agents -= 1
        return {
            "document_tokens": tokens.document_tokens,
            "computed": computed,
            "measured": agents,
            "tried": {str(n): seen for n, seen in tried.items()},
        }

    def _try_distinct(
        self, server: VllmServer, agents: int, tokens: int
    ) -> dict[str, int]:
        reset_prefix_cache(server)
        before = engine_load(server.metrics())
        prompts = self._workload.documents(agents, tokens, seed=0)
        with LoadSampler(server) as sampler:
            self._run(server, prompts, _DISTINCT_OUTPUT_TOKENS)
        preemptions = engine_load(server.metrics()).preemptions - before.preemptions
        at_once = max((load.running for load in sampler.samples), default=0)
        return {
            "at_once": at_once,
            "preemptions": preemptions,
            "together": int(at_once == agents and preemptions == 0),
        }

    def _run(
        self,
        server: VllmServer,
        prompts: list[Prompt],
        output_tokens: int,
        request_rate: float = math.inf,
    ) -> dict[str, Any]:
        """Send prompts; a server that dies is the reason that is reported."""
        return self._client.run(
            server.base_url,
            prompts,
            output_tokens,
            request_rate,
            while_waiting=server.check_alive,
            on_failure=lambda: server.check_alive(_DEATH_S),
        )
