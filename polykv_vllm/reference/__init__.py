# SPDX-License-Identifier: Apache-2.0
"""Plain torch, slow and readable: the specification of every kernel's result."""
