# SPDX-License-Identifier: Apache-2.0
"""`polykv eval`: every arm through every suite, one engine at a time; the report."""

import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from polykv_vllm.calibrate.artifact import load_record
from polykv_vllm.capacity import load_config
from polykv_vllm.errors import PolyKVError
from polykv_vllm.evaluate.arms import NONE, Arm
from polykv_vllm.evaluate.engines import start_engine
from polykv_vllm.evaluate.errors import EngineError, EvalError
from polykv_vllm.evaluate.options import SuiteOptions
from polykv_vllm.evaluate.report import Report
from polykv_vllm.evaluate.results import RunStore
from polykv_vllm.evaluate.setup import EngineSetup, bytes_per_token
from polykv_vllm.evaluate.suite import Demand, Suite
from polykv_vllm.evaluate.text import load_tokenizer
from polykv_vllm.models import resolve_model
from polykv_vllm.process import signals_unwind
from polykv_vllm.reporting import environment
from polykv_vllm.reporting.command import command_line
from polykv_vllm.reporting.progress import RunProgress

_REPORT_LINES = 2  # of a failure: what failed and why; the rest is the log's end


@dataclass(frozen=True)
class EvalOptions:
    """What the command line says.

    Attributes:
        model: A directory, a hub name, or a name of the catalogue.
        arms: The reference first.
        suites: What is measured.
        suite_options: For the suites.
        output: Run folder; None: `eval-results/<model>`.
        engine: A key of `engines.ENGINES`.
        threads: Compute threads; None: as the engine chooses.
        fresh: Delete earlier results of the folder.
        report_only: Measure nothing.

    """

    model: str
    arms: Sequence[Arm]
    suites: Sequence[type[Suite]]
    suite_options: SuiteOptions
    output: Path | None = None
    engine: str = "vllm"
    threads: int | None = None
    fresh: bool = False
    report_only: bool = False


def run_evaluation(options: EvalOptions, console: Console) -> bool:
    """Run what is missing, then report; return whether everything is as it should be.

    Raises:
        EvalError: Nothing can be measured, and why.
        ModelBuildError: The catalogue model could not be built.

    """
    require("matplotlib", "transformers", "safetensors")
    name = Path(options.model).name
    store = RunStore(options.output or Path("eval-results") / name)
    failures: list[str] = []
    if options.report_only:
        if not store.settings():
            raise EvalError(f"there are no results in {store.path} to report")
    else:
        _check_threads(options.threads)
        failures = _Run(options, store, console).do()
    report = Report(store, command_line("polykv_vllm.cli"), failures)
    report.write()
    report.show(console)
    return not failures


@dataclass
class _Run:
    """Measures what a folder does not have yet."""

    options: EvalOptions
    store: RunStore
    console: Console
    failures: list[str] = field(default_factory=list)

    def do(self) -> list[str]:
        """Measure; return messages about the arms that failed."""
        options = self.options
        suites = [suite.from_options(options.suite_options) for suite in options.suites]
        model = resolve_model(
            options.model, lambda step: self.console.print(f"  {step}")
        )
        self._config = _read_config(model)
        context = int(self._config.max_position_embeddings)
        tokenizer = load_tokenizer(model)
        demands = [suite.prepare(tokenizer, context) for suite in suites]
        demand = demands[0]
        for other in demands[1:]:
            demand |= other
        self.store.open(self._settings(suites), options.fresh)
        self._setup = EngineSetup(
            model,
            tokenizer,
            context,
            demand,
            self.store.states,
            self.store.logs,
            options.threads,
        )
        self._explain(suites, demand)
        self._measure(suites)
        return self.failures

    def _settings(self, suites: Sequence[Suite]) -> dict[str, Any]:
        folders = {arm.calibration for arm in self.options.arms} - {NONE}
        calibrations = [load_record(Path(folder)).tensors for folder in folders]
        own = {"calibration": calibrations[0]} if calibrations else {}
        return own | {
            "model": Path(self.options.model).name,
            "config_digest": _config_digest(self._config),
            "engine": self.options.engine,
            "engine_version": _engine_version(self.options.engine),
            "suites": {suite.name: suite.settings() for suite in suites},
        }

    def _explain(self, suites: Sequence[Suite], demand: Demand) -> None:
        threads = self.options.threads or len(os.sched_getaffinity(0))
        self.console.print(
            environment.headline(environment.describe(threads)), highlight=False
        )
        self.console.print(
            f"{self.options.model}: {', '.join(suite.name for suite in suites)}; arms "
            f"{', '.join(arm.name for arm in self.options.arms)}; longest request "
            f"{demand.request_tokens:,} tokens",
            highlight=False,
        )

    def _measure(self, suites: Sequence[Suite]) -> None:
        todo = {
            arm: [s for s in suites if self.store.record(arm.name, s.name) is None]
            for arm in self.options.arms
        }
        total = len(suites) * len(todo)
        missing = sum(map(len, todo.values()))
        if missing < total:
            self.console.print(
                f"{total - missing} of {total} records are in {self.store.path} "
                "already (--fresh measures them again)",
                highlight=False,
            )
        if not missing:
            return
        with signals_unwind(), RunProgress(self.console, missing) as progress:
            for arm, its_suites in todo.items():
                if not its_suites or self._attempt(arm, its_suites, progress):
                    continue
                if arm.is_reference:
                    raise EvalError(
                        f"{self.failures[-1]}\nthe other arms are compared with "
                        f"{arm.name}: nothing more can be measured"
                    )

    def _attempt(
        self, arm: Arm, suites: Sequence[Suite], progress: RunProgress
    ) -> bool:
        """Run an arm's suites; keep what it failed with for the end."""
        progress.start(arm.name)
        try:
            size = bytes_per_token(self._config, arm)
            started = start_engine(
                self.options.engine, self._setup, arm, size, progress.stage
            )
            with closing(started) as engine:
                for suite in suites:
                    progress.start(f"{arm.name}, {suite.name}")
                    self._run_suite(suite, arm, engine, progress)
                    progress.done()
        except (EngineError, PolyKVError, ValueError) as error:
            message = f"arm {arm.name}: {error}"
            self.failures.append("\n".join(message.splitlines()[:_REPORT_LINES]))
            self.console.print(f"[red]✗[/] {escape(message)}", highlight=False)
            return False
        return True

    def _run_suite(
        self, suite: Suite, arm: Arm, engine: Any, progress: RunProgress
    ) -> None:
        started = time.monotonic()
        figures = suite.run(
            engine,
            arm,
            self.store,
            lambda done, total: progress.stage(f"{done}/{total}"),
        )
        record = {
            "arm": arm.name,
            "suite": suite.name,
            "model": Path(self.options.model).name,
            "settings": suite.settings(),
            "bytes_per_token": engine.bytes_per_token,
            "engine": engine.facts,
            "seconds": round(time.monotonic() - started, 1),
            "environment": environment.describe(engine.facts.get("threads", 0)),
            "figures": figures,
        }
        self.store.save(arm.name, suite.name, record)


def require(*modules: str) -> None:
    """Raise `EvalError` naming the modules that are not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise EvalError(
            f"the evaluation needs {', '.join(missing)}: install vLLM 0.32 and "
            "'polykv-vllm[eval]' into this environment"
        )


def _check_threads(threads: int | None) -> None:
    cpus = len(os.sched_getaffinity(0))
    if threads is not None and threads > cpus:
        raise EvalError(f"{threads} compute threads on {cpus} CPU(s)")


def _read_config(model: str) -> Any:
    try:
        return load_config(model).get_text_config()
    except (OSError, ValueError) as error:
        raise EvalError(f"model {model}: {error}") from error


def _config_digest(config: Any) -> str:
    fields = config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        fields.pop(name, None)
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _engine_version(engine: str) -> str:
    package = {"vllm": "vllm", "hf": "transformers"}[engine]
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} unknown"
