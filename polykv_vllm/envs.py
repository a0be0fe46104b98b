# SPDX-License-Identifier: Apache-2.0
"""The only reader of `POLYKV_*` environment variables.

Settings that change what is served go through `--additional-config`; a variable is
for where files live and for debugging. Values are read at each call, so that a test
can change them.
"""

import os
from pathlib import Path


def cpu_isa() -> str | None:
    """`POLYKV_CPU_ISA`: the instruction set to use instead of the best one."""
    return os.environ.get("POLYKV_CPU_ISA") or None


def cache_dir() -> Path:
    """`POLYKV_CACHE`: where built models are kept.

    Default: `polykv` in the user's cache directory.
    """
    if configured := os.environ.get("POLYKV_CACHE"):
        return Path(configured).expanduser()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser() / "polykv"
