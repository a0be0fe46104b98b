# SPDX-License-Identifier: Apache-2.0
"""`polykv eval`: the evaluation's command line."""

from pathlib import Path
from typing import Annotated

import typer

from polykv_vllm.cli import task_options as task
from polykv_vllm.cli.common import Fresh, ReportOnly, Threads, fail, table_console
from polykv_vllm.models import DEFAULT_MODEL

_QUICK_CHUNKS = 4


def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(help="A directory, a hub name, or a name of `polykv model`."),
    ] = None,
    arms: Annotated[
        str,
        typer.Option(
            help="Comma-separated: formats, also with a key treatment as in "
            "polykv_k7v4+hadamard, a calibration as in polykv_k7v4+calibrated or "
            "windows of full precision as in polykv_k2v2+windows (with sizes: "
            "+windows16-128); fp32 for the noise floor; fp8. bf16 is always there."
        ),
    ] = "polykv,polykv_k7v4,polykv_k8v8",
    calibration: Annotated[
        Path | None, typer.Option(help="Folder of `polykv calibrate`.")
    ] = None,
    windows: Annotated[
        str,
        typer.Option(
            metavar="FIRST/LAST",
            help="Tokens that arms with +windows see in full precision.",
        ),
    ] = "64/256",
    suite: Annotated[str, typer.Option(help="Comma-separated.")] = "perplexity",
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text to score; default WikiText-2 of $POLYKV_DATA, without it a "
            "short text of the package."
        ),
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a chunk; default 2048.", min=2)
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens between the starts of chunks; default: no overlap."),
    ] = None,
    score_from: Annotated[
        int | None,
        typer.Option(help="First scored position of a chunk; default its half."),
    ] = None,
    max_chunks: Annotated[int | None, typer.Option(help="Most chunks; all.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for results; default eval-results/MODEL."),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="vllm, or hf: transformers in fp32, for checking.")
    ] = "vllm",
    threads: Threads = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"{DEFAULT_MODEL}, {_QUICK_CHUNKS} chunks: within 10 minutes.",
        ),
    ] = False,
    fresh: Fresh = False,
    report_only: ReportOnly = False,
    data: task.Data = None,
    items: task.Items = 20,
    seed: task.Seed = 0,
    batch: task.Batch = 8,
    answer_tokens: task.AnswerTokens = None,
    needle_tokens: task.NeedleTokens = 1800,
    haystack: task.Haystack = None,
    kv_keys: task.KvKeys = 20,
    lines: task.Lines = 60,
    shots: task.Shots = 8,
    tasks_file: task.TasksFile = None,
    prompt_field: task.PromptField = "prompt",
    answer_field: task.AnswerField = "answer",
    match: task.MatchMode = "contains",
    document: task.Document = None,
    document_tokens: task.DocumentTokens = 3072,
    documents: task.Documents = 4,
    agents: task.Agents = "1,3,5,10,15",
    questions: task.Questions = None,
) -> None:
    """Measure what a cache format costs in quality, on the real engine.

    Each arm is an engine of its own, one at a time, compared with bf16: vLLM's own
    cache in bf16. What is finished is kept: the same command goes on where it was
    interrupted. Exits with 1 when an arm failed.
    """
    from polykv_vllm.calibrate.errors import CalibrationError
    from polykv_vllm.evaluate.arms import parse_arms
    from polykv_vllm.evaluate.engines import ENGINES
    from polykv_vllm.evaluate.errors import EvalError
    from polykv_vllm.evaluate.options import (
        DocumentOptions,
        SuiteOptions,
        TaskOptions,
    )
    from polykv_vllm.evaluate.run import EvalOptions, run_evaluation
    from polykv_vllm.evaluate.suites import suites_named
    from polykv_vllm.models import ModelBuildError
    from polykv_vllm.windows.sizes import WindowError, WindowSizes

    console = table_console()
    try:
        if model is None and not quick:
            raise EvalError("which model? Name one, or --quick")
        if engine not in ENGINES:
            raise EvalError(
                f"there is no engine {engine!r}; there are: {', '.join(ENGINES)}"
            )
        if quick and max_chunks is None:
            max_chunks = _QUICK_CHUNKS
        options = EvalOptions(
            model=model or DEFAULT_MODEL,
            arms=parse_arms(arms, calibration, WindowSizes.parse(windows)),
            suites=suites_named(suite),
            suite_options=SuiteOptions(
                text,
                chunk_tokens,
                stride,
                score_from,
                max_chunks,
                TaskOptions(
                    data=data,
                    items=items,
                    seed=seed,
                    batch=batch,
                    needle_tokens=needle_tokens,
                    haystack=haystack,
                    kv_keys=kv_keys,
                    lines=lines,
                    shots=shots,
                    file=tasks_file,
                    prompt_field=prompt_field,
                    answer_field=answer_field,
                    match=match,
                    answer_tokens=answer_tokens,
                ),
                DocumentOptions(
                    document=document or text,
                    tokens=document_tokens,
                    documents=documents,
                    agents=task.agent_counts(agents),
                    questions=questions,
                    answer_tokens=answer_tokens or DocumentOptions.answer_tokens,
                    seed=seed,
                ),
            ),
            output=output,
            engine=engine,
            threads=threads,
            fresh=fresh,
            report_only=report_only,
        )
        is_good = run_evaluation(options, console)
    except (EvalError, ModelBuildError, CalibrationError, WindowError) as error:
        raise fail(error) from None
    except KeyboardInterrupt:
        console.print("interrupted: what is finished is kept, the same command goes on")
        raise typer.Exit(130) from None
    if not is_good:
        raise typer.Exit(1)
