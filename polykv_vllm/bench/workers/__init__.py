# SPDX-License-Identifier: Apache-2.0
"""Classes for `--worker-extension-cls`: arms that differ inside vLLM's worker.

Each module changes its process when it is imported, which only the worker of such an
arm does. No other code may import them.
"""
