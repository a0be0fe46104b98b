# SPDX-License-Identifier: Apache-2.0
"""PTX for what Triton has no operation for: four bytes of a register at a time.

A value code of 3 bits selects a level: `prmt` picks four bytes out of eight by the
nibbles of its selector, so one instruction looks four codes up. A token's code sits in
a byte of its own, so the selector is first drawn together from bytes to nibbles.
Instructions for each four values: 8 with 3-bit codes, 14 with 7-bit keys, 11 and 12
for the two nibbles of 4-bit codes (docs/gpu.md).
"""

from dataclasses import dataclass
from functools import cache

from polykv_vllm.kernels.triton.tile import Tile


@dataclass(frozen=True)
class Assembly:
    """PTX of one format; a constexpr of kernels.

    Attributes:
        inline: Whether to use it; else the plain Triton code runs.
        key_codes: Bytes of keys ($1) to int8 codes ($0).
        octets: Planes ($1 low, $2 high, $3 top; or $1 nibbles) to levels ($0), for each
            octet of dimensions (unpack.py).

    """

    inline: bool = False
    key_codes: str = ""
    octets: tuple[str, ...] = ()


PLAIN = Assembly()


@cache
def assembly_of(tile: Tile) -> Assembly:
    """Return the PTX for a tile's format."""
    keys = (
        "and.b32 $0, $1, 0x7f7f7f7f;"
        if tile.key_bits == 7
        else "xor.b32 $0, $1, 0x80808080;"
    )
    if tile.plane_bits == 8:
        return Assembly(True, keys)
    if tile.plane_bits == 4:
        return Assembly(True, keys, tuple(_nibble(tile, e // 2 % 2) for e in range(8)))
    return Assembly(True, keys, tuple(_planes(tile, e) for e in range(8)))


def _shift(target: str, source: str, right: int) -> str:
    """Shift right by `right` bits, left if negative."""
    if right == 0:
        return f"mov.b32 {target}, {source};"
    if right > 0:
        return f"shr.u32 {target}, {source}, {right};"
    return f"shl.b32 {target}, {source}, {-right};"


def _word(levels: tuple[int, ...]) -> str:
    """Return four int8 as a literal, the first in the lowest byte."""
    return hex(sum((level & 0xFF) << (8 * i) for i, level in enumerate(levels)))


def _planes(tile: Tile, octet: int) -> str:
    place = octet // 2 + 4 * (octet % 2)
    lines = [
        _shift("a", "$1", octet // 2 * 2),
        "and.b32 a, a, 0x03030303;",
        _shift("b", "$2", place - 2),
        "lop3.b32 a, b, 0x04040404, a, 0xea;",  # (b & mask) | a
    ]
    if tile.key_bits == 7:
        # The top bit as a whole byte of ones or zeros: prmt repeats a byte's sign.
        lines += [_shift("b", "$3", place - 7), "prmt.b32 m, b, b, 0xba98;"]
    return _block(lines + _look_up(tile.levels))


def _nibble(tile: Tile, half: int) -> str:
    lines = [
        _shift("b", "$1", 4 * half - 4),  # bit 3 of the code to bit 7
        "prmt.b32 m, b, b, 0xba98;",
        _shift("a", "$1", 4 * half),
        "and.b32 a, a, 0x07070707;",
    ]
    return _block(lines + _look_up(tile.levels))


def _look_up(levels: tuple[int, ...]) -> list[str]:
    """From codes of 3 bits in the bytes of `a` to levels; `m` chooses the upper eight."""
    lines = [
        "shr.u32 b, a, 4;",
        "or.b32 a, a, b;",  # codes 0, 1 in byte 0; codes 2, 3 in byte 2
        "prmt.b32 a, a, a, 0x2020;",
    ]
    first = f"{_word(levels[:4])}, {_word(levels[4:8])}, a;"
    if len(levels) == 8:
        return [*lines, f"prmt.b32 $0, {first}"]
    second = f"{_word(levels[8:12])}, {_word(levels[12:])}, a;"
    return [
        *lines,
        f"prmt.b32 b, {first}",
        f"prmt.b32 a, {second}",
        "lop3.b32 $0, m, a, b, 0xca;",  # m ? a : b
    ]


def _block(lines: list[str]) -> str:
    return "{ .reg .b32 a, b, m; " + " ".join(lines) + " }"
