// SPDX-License-Identifier: Apache-2.0
// What the products of all vector instruction sets have in common: blocks of rows whose
// sums stay in registers.
#pragma once

namespace polykv {
namespace {

constexpr int kGroupRegs = 64 / kRegBytes;  // registers for 16 lanes of 32 bits

// Calls fn(0), ..., fn(N - 1) with constants. A loop with a run-time index over the
// accumulators, even the one that clears them, makes GCC 12 keep the whole array on the
// stack; its unroll pragma comes too late to prevent it.
template <typename Fn, int... I>
inline void for_each_index(std::integer_sequence<int, I...>, Fn fn) {
  (fn(std::integral_constant<int, I>{}), ...);
}
template <int N, typename Fn>
inline void unrolled(Fn fn) {
  for_each_index(std::make_integer_sequence<int, N>{}, fn);
}

// Calls fn(count, row) for N rows at a time and then for what is left of them; the
// counts are constants.
template <int N, typename Fn>
inline void by_rows(int rows, Fn fn) {
  int row = 0;
  for (; row + N <= rows; row += N) fn(std::integral_constant<int, N>{}, row);
  unrolled<N - 1>([&](auto i) {
    constexpr int kCount = i + 1;
    if (rows - row == kCount) fn(std::integral_constant<int, kCount>{}, row);
  });
}

// Sums of R rows x C registers for one or both terms: T * R * C registers.
template <int T, int R, int C>
struct Accumulators {
  Reg sum[T][R][C];

  void clear() {
    fill([](auto, auto, auto) { return zero_reg(); });
  }
  // Begins with start(term, row, register).
  template <typename Fn>
  void fill(Fn start) {
    unrolled<T>([&](auto t) {
      unrolled<R>([&](auto r) {
        unrolled<C>([&](auto c) { sum[t][r][c] = start(t, r, c); });
      });
    });
  }

  // Hands the sums out, 16 lanes at a time, to sink(row, first, term 0, term 1). Through
  // memory: a sink that takes them from the registers makes GCC 12 keep them on the
  // stack throughout the loop before.
  template <typename Sink>
  void drain(int row, int first, Sink sink) const {
    alignas(64) int32_t out[T][R][C * kRegLanes];
    unrolled<T>([&](auto t) {
      unrolled<R>([&](auto r) {
        unrolled<C>(
            [&](auto c) { store_reg(out[t][r] + c * kRegLanes, sum[t][r][c]); });
      });
    });
    for (int r = 0; r < R; ++r) {
      for (int lane = 0; lane < C * kRegLanes; lane += 16) {
        sink(row + r, first + lane, load_i(out[0][r] + lane),
             T == 2 ? load_i(out[T - 1][r] + lane) : set1_i(0));
      }
    }
  }
};

}  // namespace
}  // namespace polykv
