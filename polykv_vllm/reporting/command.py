# SPDX-License-Identifier: Apache-2.0
"""How a report says what made it."""

import os
import shlex
import sys


def command_line(module: str) -> str:
    """Return the command line of this process, as a person would type it.

    Args:
        module: What `python -m` runs where it is not the `polykv` script.

    """
    name = os.path.basename(sys.argv[0])
    start = ["polykv"] if name == "polykv" else ["python", "-m", module]
    return shlex.join([*start, *sys.argv[1:]])
