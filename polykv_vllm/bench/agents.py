# SPDX-License-Identifier: Apache-2.0
"""`polykv bench agents`: many agents behind one system prompt, arm beside arm."""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from polykv_vllm.bench import report
from polykv_vllm.bench.arms import Arm, arm_named
from polykv_vllm.bench.cpus import plan_cpus
from polykv_vllm.bench.errors import BenchError
from polykv_vllm.bench.pool import ServePlan
from polykv_vllm.bench.results import ResultFolder
from polykv_vllm.bench.run import Runner, usable_arms
from polykv_vllm.bench.scenario import Scenario, load_scenario
from polykv_vllm.bench.summary import collect
from polykv_vllm.bench.workload import Workload, read_prompts
from polykv_vllm.capacity import load_config
from polykv_vllm.formats import CACHE_DTYPES
from polykv_vllm.models import resolve_model
from polykv_vllm.reporting import environment
from polykv_vllm.reporting.command import command_line
from polykv_vllm.server import STARTUP_TIMEOUT_S
from polykv_vllm.support import check_model

_DOCUMENT_OUTPUT_TOKENS = 128


@dataclass(frozen=True)
class AgentsOptions:
    """What the command line says.

    Attributes:
        scenario: A name, or a path to a YAML file.
        overrides: Keys of the scenario that are replaced.
        output: Folder for results; None: `bench-results/<scenario>`.
        port: Of the first server; None: free ones.
        fresh: Delete earlier results of the folder.
        report_only: Measure nothing.
        startup_timeout_s: How long a server may take until it answers.

    """

    scenario: str
    overrides: dict[str, Any]
    output: Path | None = None
    port: int | None = None
    fresh: bool = False
    report_only: bool = False
    startup_timeout_s: float = STARTUP_TIMEOUT_S


def run_agents(options: AgentsOptions, console: Console) -> bool:
    """Run what is missing, then report; return whether everything is as it should be.

    Raises:
        BenchError: Nothing can be measured, and why.
        ModelBuildError: The catalogue model could not be built.

    """
    require("pandas", "matplotlib", "transformers")
    scenario = load_scenario(options.scenario, options.overrides)
    output = options.output or Path("bench-results") / Path(options.scenario).stem
    arms = usable_arms(scenario, console)
    folder = ResultFolder(output)
    failures: list[str] = []
    # The engines must not ask a hub for what they are: nothing here is online.
    model = resolve_model(scenario.model, lambda step: console.print(f"  {step}"))
    folder.open(scenario, model, options.fresh)
    if not options.report_only:
        plan, workload = prepare(scenario, model, output, options.port)
        plan = replace(plan, startup_timeout_s=options.startup_timeout_s)
        console.print(
            environment.headline(environment.describe(scenario.threads)),
            highlight=False,
        )
        _explain(scenario, arms, plan, console)
        failures = Runner(scenario, plan, workload, folder, console).run(arms)
    summary = collect(scenario, arms, folder)
    summary.problems += failures
    report.write(summary, output, command_line("benchmarks.agents"))
    report.show(summary, output, console)
    return not summary.problems


def prepare(
    scenario: Scenario, model: str, output: Path, port: int | None
) -> tuple[ServePlan, Workload]:
    """Read the model's config and make prompts, so that errors come before servers.

    Raises:
        BenchError: No such model, too few CPUs, or prompts longer than its context.

    """
    try:
        config = load_config(model).get_text_config()
    except (OSError, ValueError) as error:
        raise BenchError(f"model {scenario.model}: {error}") from error
    prompts = []
    if scenario.prompts_dir is not None:
        from transformers import AutoTokenizer

        prompts = read_prompts(
            scenario.prompts_dir, AutoTokenizer.from_pretrained(model)
        )
    workload = Workload(scenario, config.vocab_size, prompts)
    longest = _longest_request(scenario, prompts)
    if longest > config.max_position_embeddings:
        raise BenchError(
            f"the longest request has {longest:,} tokens, {scenario.model} takes "
            f"{config.max_position_embeddings:,}: shorten shared_tokens, own_tokens, "
            "output_tokens or the prompts"
        )
    # In whole blocks: the engine then counts the tokens of all blocks.
    max_model_len = min(
        -(-longest // scenario.block_size) * scenario.block_size,
        config.max_position_embeddings,
    )
    try:
        cpus = plan_cpus(scenario.threads)
    except ValueError as error:
        raise BenchError(str(error)) from error
    logs = output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    per_token = {
        name: expected_token_bytes(config, arm_named(name)) for name in scenario.arms
    }
    plan = ServePlan(model, max_model_len, cpus, per_token, logs, port)
    return plan, workload


def expected_token_bytes(config: Any, arm: Arm) -> int:
    """Return the cache bytes of a token in all layers; 0 where it is not known."""
    support = check_model(config, arm.cache_dtype)
    if arm.cache_dtype in CACHE_DTYPES:
        return support.bytes_per_token if support.ok else 0
    return support.uncompressed_bytes_per_token(1 if arm.cache_dtype == "fp8" else 2)


def _longest_request(scenario: Scenario, prompts: list[list[int]]) -> int:
    shared = max([*scenario.shared_tokens, *map(len, prompts)])
    lengths = [shared + scenario.own_tokens + scenario.output_tokens]
    if scenario.memory_figure is not None:
        lengths.append(scenario.memory_figure.shared_tokens + scenario.block_size)
    if scenario.distinct is not None:
        lengths.append(scenario.distinct.document_tokens + _DOCUMENT_OUTPUT_TOKENS)
    return max(lengths)


def _explain(
    scenario: Scenario, arms: list[Arm], plan: ServePlan, console: Console
) -> None:
    """Print what will be run."""
    for arm in arms:
        console.print(f"  [bold]{arm.name}[/]: {arm.about}", highlight=False)
    cases = ", ".join(case.name for case in scenario.cases())
    console.print(
        f"{scenario.model}, agents x shared tokens: {cases}; "
        f"{scenario.repetitions} repetitions in turns, cache {scenario.cache_mib} MiB, "
        f"prefix caching on in every arm, CPUs {plan.cpus.compute} compute",
        highlight=False,
    )
    if not plan.cpus.is_apart:
        console.print(
            "[yellow]There is no CPU beside the compute threads: client and engine "
            "disturb each other.[/]"
        )


def require(*modules: str) -> None:
    """Raise `BenchError` naming the modules that are not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise BenchError(
            f"the benchmark needs {', '.join(missing)}: install vLLM 0.32 and "
            "'polykv-vllm[bench]' into this environment"
        )
