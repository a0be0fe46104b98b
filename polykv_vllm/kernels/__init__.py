# SPDX-License-Identifier: Apache-2.0
"""Kernels written in Python: Triton's for GPUs. The C++ ones are in `csrc/`."""
