// SPDX-License-Identifier: Apache-2.0
// Which tokens a query row attends to, and in which tier: the one place that says so.
#pragma once

#include <cstdint>

#include "polykv/args.h"

namespace polykv {
namespace {  // kernels compile this for their own instruction set

// Tokens begin..end of a sequence; nothing where end <= begin.
struct TokenSpan {
  int64_t begin, end;
  bool empty() const { return end <= begin; }
};

struct SeenTokens {
  TokenSpan cached;         // as the cache holds them
  TokenSpan sinks, recent;  // as the model made them
};

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Begins and ends never fall as `position` rises.
inline SeenTokens seen_tokens(const AttentionArgs& args, int request,
                              int64_t position) {
  const int64_t end = position + 1;
  const int64_t visible =
      args.sliding_window > 0 ? larger(0, end - args.sliding_window) : 0;
  const Windows& windows = args.windows;
  if (windows.sink_tokens == nullptr) return {{visible, end}, {0, 0}, {0, 0}};
  const int64_t sinks = smaller(windows.sink_tokens[request], end);
  const int64_t recent =
      larger(end - windows.recent_tokens, windows.recent_begin[request]);
  const int64_t begin = larger(visible, sinks);
  return {{begin, recent}, {visible, sinks}, {larger(begin, recent), end}};
}

}  // namespace
}  // namespace polykv
