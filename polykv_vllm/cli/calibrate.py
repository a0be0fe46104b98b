# SPDX-License-Identifier: Apache-2.0
"""`polykv calibrate`: transforms of keys and values from a text."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polykv_vllm.cli.common import Threads, fail
from polykv_vllm.models import DEFAULT_MODEL


def calibrate(
    model: Annotated[
        str | None,
        typer.Argument(help="A directory, a hub name, or a name of `polykv model`."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text to read, .txt or .jsonl; repeat it for more files."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder; default calibration/MODEL."),
    ] = None,
    field: Annotated[
        str,
        typer.Option(help="Field of .jsonl lines; dots and lists: ctxs.text."),
    ] = "text",
    sequences: Annotated[
        int | None, typer.Option(help="Most sequences; default 128.", min=1)
    ] = None,
    sequence_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; default 2048.", min=16)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of sequences.")] = 0,
    damping: Annotated[
        float, typer.Option(help="Share of the mean added to diagonals.", min=0)
    ] = 1e-2,
    transform: Annotated[
        str,
        typer.Option(help="identity, random, hadamard, oscar, wush or wush_a."),
    ] = "wush",
    center_keys: Annotated[
        bool,
        typer.Option(
            help="Subtract the mean key from every key; not possible for models with "
            "attention sinks or a soft cap."
        ),
    ] = True,
    dtype: Annotated[
        str,
        typer.Option(
            help="Of the forward pass: float32, or bfloat16 in half the memory."
        ),
    ] = "float32",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help=f"{DEFAULT_MODEL}, 64 sequences of 512: a few minutes."
        ),
    ] = False,
    threads: Threads = None,
) -> None:
    """Make transforms of keys and values from a text, for a cache of few bits.

    Serve with the folder: --additional-config '{"polykv": {"calibration": "DIR"}}', or
    put it into the model's own folder, as MODEL/polykv.
    """
    import torch
    from transformers.utils import logging

    from polykv_vllm.calibrate import run
    from polykv_vllm.calibrate.build import TRANSFORMS
    from polykv_vllm.errors import PolyKVError
    from polykv_vllm.evaluate.errors import EvalError
    from polykv_vllm.models import ModelBuildError, resolve_model
    from polykv_vllm.reporting.progress import RunProgress

    console = Console()
    logging.disable_progress_bar()
    try:
        if model is None and not quick:
            raise EvalError("which model? Name one, or --quick")
        if not text:
            raise EvalError("which text? Name files: --text FILE")
        if transform not in TRANSFORMS:
            raise EvalError(
                f"there is no transform {transform!r}; there are: "
                f"{', '.join(TRANSFORMS)}"
            )
        if dtype not in run.DTYPES:
            raise EvalError(f"--dtype is {' or '.join(run.DTYPES)}, not {dtype!r}")
        name = model or DEFAULT_MODEL
        if quick:
            sequences = sequences or run.QUICK_SEQUENCES
            sequence_tokens = sequence_tokens or run.QUICK_SEQUENCE_TOKENS
        path = resolve_model(name, lambda step: console.print(f"  {step}"))
        options = run.CalibrateOptions(
            model=path,
            texts=text,
            field=field,
            sequences=sequences or run.SEQUENCES,
            sequence_tokens=sequence_tokens,
            seed=seed,
            damping=damping,
            transform=transform,
            center_keys=center_keys,
            dtype=dtype,
        )
        if threads is not None:
            torch.set_num_threads(threads)
        folder = output or Path("calibration") / Path(name).name
        with RunProgress(console, options.sequences) as bar:
            bar.start("reading text")
            result = run.calibrate(options, folder, bar.update)
    except (EvalError, PolyKVError, ModelBuildError) as error:
        raise fail(error) from None
    for warning in result.warnings:
        console.print(f"[yellow]note:[/] {warning}", highlight=False, soft_wrap=True)
    record = result.record
    worst = max(
        max(map(max, record.key_condition)), max(map(max, record.value_condition))
    )
    console.print(
        f"{record.transform}: {record.model.num_layers} layers x "
        f"{record.model.num_kv_heads} KV heads from {record.text.tokens:,} tokens, "
        f"condition numbers up to {worst:.0f}",
        highlight=False,
    )
    console.print(
        "serve with: --additional-config "
        f'\'{{"polykv": {{"calibration": "{folder}"}}}}\'',
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
