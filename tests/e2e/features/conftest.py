# SPDX-License-Identifier: Apache-2.0
"""All engines are run once, by one program, before the first test that looks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.features.models import save_adapters, save_gemma, save_llama
from tests.e2e.features.session import Sequence, map_sequences

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="package")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """For each group what it returned, with `Sequence`s that have been judged."""
    models = tmp_path_factory.mktemp("features")
    save_adapters(models, save_llama(models / "llama"))
    save_gemma(models / "gemma")
    path = models / "results.json"
    program = [sys.executable, "-m", "tests.e2e.features.program"]
    with (models / "log").open("w") as log:
        done = subprocess.run(
            [*program, str(models), str(path)],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
    assert done.returncode == 0, (models / "log").read_text()[-3000:]
    return dict(
        map_sequences(json.loads(path.read_text()), lambda fields: Sequence(**fields))
    )
