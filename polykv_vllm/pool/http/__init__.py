# SPDX-License-Identifier: Apache-2.0
"""Prefixes over HTTP, below `/v1/polykv`, where vLLM's API key guards them.

`spec.py` is what a prefix is asked for with, in a request or in a file; `service.py`
has it rendered, computed and pinned; `plugin.py` is what vLLM loads.
"""
