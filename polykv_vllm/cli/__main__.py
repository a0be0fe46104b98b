# SPDX-License-Identifier: Apache-2.0
"""Runs the command as `python -m polykv_vllm.cli`."""

from polykv_vllm.cli.app import main

if __name__ == "__main__":
    main()
