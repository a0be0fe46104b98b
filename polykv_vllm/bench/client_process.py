# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve`, run after run in one process: importing it takes ten seconds.

Orders are JSON lists on standard input: arguments of `vllm bench serve`. After each run
an answer, {} or {"error": ...}, goes as a JSON line to the descriptor given as first
argument (the client prints to standard output). It ends when its input ends.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    """Run orders until the input ends."""
    from vllm.entrypoints.cli.benchmark.serve import BenchmarkServingSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    answers = os.fdopen(int(sys.argv[1]), "w")

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer({})
    for line in sys.stdin:
        parser = FlexibleArgumentParser(prog="vllm bench serve")
        BenchmarkServingSubcommand.add_cli_args(parser)
        try:
            BenchmarkServingSubcommand.cmd(parser.parse_args(json.loads(line)))
        except (Exception, SystemExit) as error:
            answer({"error": f"{type(error).__name__}: {error}"})
        else:
            answer({})


if __name__ == "__main__":
    main()
