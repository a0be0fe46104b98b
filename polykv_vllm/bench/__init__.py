# SPDX-License-Identifier: Apache-2.0
"""`polykv bench`: servers side by side, driven by vLLM's own benchmark client."""
