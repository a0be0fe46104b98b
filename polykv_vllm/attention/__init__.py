# SPDX-License-Identifier: Apache-2.0
"""What vLLM sees of us: backend, metadata, implementation. No maths here."""
