# SPDX-License-Identifier: Apache-2.0
"""What a figure depends on; shared with `polykv bench`, which has it in the wheel."""

from polykv_vllm.reporting.environment import describe, headline

__all__ = ["describe", "headline"]
