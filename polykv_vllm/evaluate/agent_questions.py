# SPDX-License-Identifier: Apache-2.0
"""What agents ask about a document, whatever it is about."""

from pathlib import Path

from polykv_vllm.evaluate.errors import EvalError

QUESTIONS = (
    "What is this text about? Answer in two sentences.",
    "Which person or group does the text mention first, and what is said about it?",
    "List three facts that the text states.",
    "Which places does the text name?",
    "Which years or dates does the text mention, and what happened then?",
    "Write a title for this text.",
    "What happens near the end of the text?",
    "Which numbers does the text give, and what do they count?",
    "Explain the beginning of the text to a child.",
    "What would a reader want to know that the text leaves open?",
    "Which event does the text describe in most detail?",
    "What causes and effects does the text describe?",
    "Which organisations or titles of works does the text name?",
    "Summarize the middle of the text in one sentence.",
    "What is the most surprising statement in the text?",
)


def read_questions(path: Path | None, needed: int) -> list[str]:
    """Return questions: those of a file first, then the general ones.

    Args:
        path: One question a line, blank lines are passed over; None: no file.
        needed: How many there must be.

    Raises:
        EvalError: The file cannot be read or is empty, or there are too few.

    """
    own: list[str] = []
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise EvalError(f"cannot read the questions of {path}: {error}") from error
        own = [line.strip() for line in lines if line.strip()]
        if not own:
            raise EvalError(f"{path} has no questions")
    questions = [*own, *(each for each in QUESTIONS if each not in own)]
    if len(questions) < needed:
        raise EvalError(
            f"{needed} agents ask a question each; there are {len(questions)}: "
            "--questions FILE adds one for each line"
        )
    return questions
