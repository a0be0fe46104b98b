# SPDX-License-Identifier: Apache-2.0
"""The few places where vLLM 0.32 has no hook for what we need.

`python -m polykv_vllm.seams` prints them with their state.
"""
