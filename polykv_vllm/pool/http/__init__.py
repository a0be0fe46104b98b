# SPDX-License-Identifier: Apache-2.0
"""Prefixes over HTTP, below `/v1/polykv`, where vLLM's API key guards them.

`spec.py` is what a prefix is asked for with, in a request or in a file; `service.py`
has it rendered, computed and pinned; `plugin.py` is what vLLM loads.
"""

ROOT = "/v1/polykv"
"""Below which all routes lie."""

SALT_HEADER = "X-Cache-Salt"
"""The `cache_salt` of the requests that a call is about."""
