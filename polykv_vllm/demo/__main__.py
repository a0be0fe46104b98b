# SPDX-License-Identifier: Apache-2.0
"""Runs the demo as `python -m polykv_vllm.demo`, with the options of `polykv demo`."""

import typer

from polykv_vllm.cli.app import demo

if __name__ == "__main__":
    typer.run(demo)
