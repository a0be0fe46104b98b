# SPDX-License-Identifier: Apache-2.0
"""Every configuration that we ship is one that `vllm serve` accepts."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIGS = [
    *sorted((ROOT / "configs" / "serve").glob("*.yaml")),
    ROOT / "polykv_vllm" / "demo" / "data" / "serve.yaml",
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_vllm_accepts_it(config: Path) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from polykv_vllm.plugin import register

    register()
    parser = make_arg_parser(FlexibleArgumentParser())
    options = parser.parse_args(["--config", str(config)])
    assert options.kv_cache_memory_bytes >= 2**28
    assert options.max_num_seqs >= 8


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_key_is_explained(config: Path) -> None:
    lines = config.read_text().splitlines()
    keys = [line for line in lines if line and not line.startswith("#")]
    assert keys
    assert all("  # " in line for line in keys)
