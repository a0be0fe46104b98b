// SPDX-License-Identifier: Apache-2.0
// What the integer products of all instruction sets are told.
#pragma once

namespace polykv {
namespace {

constexpr int kSubRows = 16;  // rows that share a pass over the unpacked tile

// The two int8 terms of 16-bit operands lie one after the other (row `low_row` begins
// the low term), so hardware with tall tiles can take them as one operand.
// Probabilities of 8 bits are the high term alone; the low one is then zero.
struct GemmShape {
  int rows;      // <= kSubRows
  int low_row;   // row at which the low terms begin: rows if 2 * rows <= 16, else 16
  int subtiles;  // 16-token groups with data
};

}  // namespace
}  // namespace polykv
