# SPDX-License-Identifier: Apache-2.0
"""The `POLYKV_*` environment variables.

Settings that change what is served go through `--additional-config`; a variable is
for where files live and for debugging. `POLYKV_CPU_ISA`, which forces an instruction
set, is read in `ops/`: that layer imports nothing but those below it.
"""

import os
from pathlib import Path

METRICS_DIR = "POLYKV_METRICS_DIR"
"""Set by the front end for the processes it starts, never by a user."""


def cache_dir() -> Path:
    """`POLYKV_CACHE`: where built models are kept.

    Read at each call. Default: `polykv` in the user's cache directory.
    """
    if configured := os.environ.get("POLYKV_CACHE"):
        return Path(configured).expanduser()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser() / "polykv"


def data_dir() -> Path | None:
    """`POLYKV_DATA`: folder of texts and tasks for `polykv eval`; None: there is none.

    Read at each call.
    """
    directory = os.environ.get("POLYKV_DATA")
    return Path(directory).expanduser() if directory else None


def metrics_dir() -> Path | None:
    """Return where the workers of this server show their metrics; None: nowhere."""
    directory = os.environ.get(METRICS_DIR)
    return Path(directory) if directory else None
