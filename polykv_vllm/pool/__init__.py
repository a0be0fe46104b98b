# SPDX-License-Identifier: Apache-2.0
"""What the blocks of the cache are shared by: policy, no kernels."""
