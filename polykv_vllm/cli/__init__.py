# SPDX-License-Identifier: Apache-2.0
"""The `polykv` command."""

from polykv_vllm.cli.app import app, main

__all__ = ["app", "main"]
