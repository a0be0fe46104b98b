# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of the store and of attention (docs/gpu.md).

    rows.py       device code: load, rotate, round
    quantize.py   device code: codes, scales and their bytes
    store.py      the kernel that quantizes, packs and scatters
    unpack.py     device code: packed tiles to int8 operands
    softmax.py    device code: one tile's softmax, folding of partial results
    attend.py     the kernels of attention
    plan.py       a batch as work lists of fixed capacity
    config.py     block sizes by architecture, format and head size
    tile.py       what kernels know of a format at compile time
    assembly.py   PTX for four bytes at a time
    arguments.py  checks; scratch.py: memory; interpret.py: for tests on a CPU
    launch.py     the operations' two classes

Importing this package imports no Triton; its modules with kernels do.
"""
