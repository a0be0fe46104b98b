# SPDX-License-Identifier: Apache-2.0
"""Which tokens are also held in full precision, and where. Pure Python.

`sizes` says what windows take, `table` which raw page has which tokens of which block.
`attention/windows.py` brings both into the engine; `docs/windows.md` has the whole.
"""
