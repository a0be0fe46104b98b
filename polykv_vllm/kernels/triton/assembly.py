# SPDX-License-Identifier: Apache-2.0
"""PTX for what Triton has no operation for: four bytes of a register at a time.

A value code of 3 bits selects a level: `prmt` picks four bytes out of eight by the
nibbles of its selector, so one instruction looks four codes up. Each code sits in a
byte of its own, s bits from its right end, and a selector needs them in neighbouring
nibbles: a product with 2^(4-s) + 2^(8-s) puts codes 0 and 1 into byte 1, codes 2 and 3
into byte 3, and brings the field to its place at the same time.

Integer products run beside the logic unit, which is what these kernels have least of:
per four values it has four or five instructions with 3-bit codes (docs/gpu.md).
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
    """Look up codes with bits 0 and 1 in `$1`, bit 2 in `$2` and bit 3 in `$3`.

    Bits 0 and 1 stay where they are, at 2 * field of each byte. Bit 2 is put above
    them in field 0, below them in the others: there it is the lowest bit of the code,
    and the table of levels is permuted accordingly. Field 3 moves down first.
    """
    field, half = divmod(octet, 2)
    place = field + 4 * half
    lines, low, start = [], "$1", 2 * field
    if field == 3:
        lines, low, start = [_shift("a", "$1", 4)], "a", 2
    bit = 2 if start == 0 else start - 1
    lines += [
        f"and.b32 a, {low}, {_bytes(3 << start)};",
        _shift("b", "$2", place - bit),
        f"lop3.b32 a, b, {_bytes(1 << bit)}, a, 0xea;",  # (b & mask) | a
    ]
    if tile.key_bits == 7:
        # The top bit as a whole byte of ones or zeros: prmt repeats a byte's sign.
        lines += [_shift("b", "$3", place - 7), "prmt.b32 m, b, b, 0xba98;"]
    if start == 0:
        return _block(lines + _look_up(tile.levels, 0))
    order = [code >> 1 | (code & 1) << 2 for code in range(8)]
    levels = [
        tile.levels[i + code] for i in range(0, len(tile.levels), 8) for code in order
    ]
    return _block(lines + _look_up(tuple(levels), bit))


def _nibble(tile: Tile, half: int) -> str:
    lines = [
        _shift("b", "$1", 4 * half - 4),  # bit 3 of the code to bit 7
        "prmt.b32 m, b, b, 0xba98;",
        f"and.b32 a, $1, {_bytes(7 << 4 * half)};",
    ]
    return _block(lines + _look_up(tile.levels, 4 * half))


def _look_up(levels: tuple[int, ...], start: int) -> list[str]:
    """From codes of 3 bits at `start` of each byte of `a` to levels.

    With sixteen levels the bytes of `m` choose the upper eight.
    """
    lines = [
        f"mul.lo.u32 a, a, {hex((1 << 4 | 1 << 8) >> start)};",
        "prmt.b32 a, a, a, 0x3131;",
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


def _bytes(byte: int) -> str:
    """Return a word with four times the same byte as a literal."""
    return hex(byte * 0x01010101)


def _block(lines: list[str]) -> str:
    return "{ .reg .b32 a, b, m; " + " ".join(lines) + " }"
