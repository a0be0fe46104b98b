# SPDX-License-Identifier: Apache-2.0
"""JSON files that are complete or not there."""

import json
import math
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, record: Any) -> None:
    """Write `record`; a reader sees the old file or all of the new one.

    NaN and infinities, which JSON does not have, become null.
    """
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(_finite(record), indent=1) + "\n")
    temporary.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
