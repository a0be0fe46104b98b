# SPDX-License-Identifier: Apache-2.0
"""Compressed blocks on disk: what they are called, where they lie, who reads them.

`fields.py`, `weights.py`, `identity.py` and `content.py` make the names; `blockfile.py`
is the file of one block, `store.py` a directory of them, `writer.py` the thread that
fills it. `connector.py` and its two halves bring them to vLLM; only those import it.
"""
