# SPDX-License-Identifier: Apache-2.0
"""Options of `polykv eval` that only some suites read, and what says so in its help."""

from pathlib import Path
from typing import Annotated

import typer

_TASKS = "Tasks"
_DOCUMENT = "Suite document"

Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder with the tasks' files; default $POLYKV_DATA.",
        rich_help_panel=_TASKS,
    ),
]
Items = Annotated[
    int, typer.Option(help="Most items of a task.", min=1, rich_help_panel=_TASKS)
]
Seed = Annotated[
    int,
    typer.Option(help="Of what is drawn, and of intervals.", rich_help_panel=_TASKS),
]
Batch = Annotated[
    int, typer.Option(help="Most requests at once.", min=1, rich_help_panel=_TASKS)
]
AnswerTokens = Annotated[
    int | None,
    typer.Option(
        help="Longest answer; default as the task needs.",
        min=1,
        rich_help_panel=_TASKS,
    ),
]
NeedleTokens = Annotated[
    int,
    typer.Option(
        help="needle: length of the text with the number.", rich_help_panel=_TASKS
    ),
]
Haystack = Annotated[
    Path | None,
    typer.Option(
        help="needle: that text; default passages of --data.", rich_help_panel=_TASKS
    ),
]
KvKeys = Annotated[
    int, typer.Option(help="kv_retrieval: keys of an object.", rich_help_panel=_TASKS)
]
Lines = Annotated[
    int, typer.Option(help="lines: lines of a record.", rich_help_panel=_TASKS)
]
Shots = Annotated[
    int,
    typer.Option(
        help="gsm8k: worked examples that all questions share.", rich_help_panel=_TASKS
    ),
]
TasksFile = Annotated[
    Path | None,
    typer.Option(help="jsonl: the file, an item a line.", rich_help_panel=_TASKS),
]
PromptField = Annotated[
    str, typer.Option(help="jsonl: field of a line.", rich_help_panel=_TASKS)
]
AnswerField = Annotated[
    str, typer.Option(help="jsonl: likewise.", rich_help_panel=_TASKS)
]
MatchMode = Annotated[
    str,
    typer.Option(
        help="jsonl: what counts: exact, contains or number.", rich_help_panel=_TASKS
    ),
]
Document = Annotated[
    Path | None,
    typer.Option(help="A text file; default as --text.", rich_help_panel=_DOCUMENT),
]
DocumentTokens = Annotated[
    int, typer.Option(help="Tokens of a document.", min=2, rich_help_panel=_DOCUMENT)
]
Documents = Annotated[
    int,
    typer.Option(
        help="Consecutive documents of the text.", min=1, rich_help_panel=_DOCUMENT
    ),
]
Agents = Annotated[
    str,
    typer.Option(
        help="Comma-separated: how many ask at once.", rich_help_panel=_DOCUMENT
    ),
]
Questions = Annotated[
    Path | None,
    typer.Option(
        help="A question a line, asked before the general ones.",
        rich_help_panel=_DOCUMENT,
    ),
]


def agent_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of a comma-separated list, ascending, each once.

    Raises:
        EvalError: There is something else in it.

    """
    from polykv_vllm.evaluate.errors import EvalError

    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise EvalError(
            f"--agents {text}: numbers with commas between them, as in 1,5,15"
        ) from None
