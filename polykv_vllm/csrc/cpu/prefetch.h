// SPDX-License-Identifier: Apache-2.0
// Fetches the next tile while this one is being worked on.
#pragma once

namespace polykv {
namespace {

// A core has some 16 misses in flight: asking for a whole tile at once would stall, so
// the kernels call step() between their inner loops and each call asks for a few lines.
class Prefetcher {
 public:
  void clear() { count_ = next_ = 0; }

  // Plans the lines of [begin, begin + bytes).
  void add(const uint8_t* begin, int64_t bytes) {
    runs_[count_++] = {begin, begin + bytes};
  }

  void step() {
    for (int left = kLinesPerStep; left > 0 && next_ < count_; --left) {
      Run& run = runs_[next_];
      prefetch(run.begin);
      run.begin += 64;
      if (run.begin >= run.end) ++next_;
    }
  }

 private:
  static constexpr int kLinesPerStep = 10;
  static constexpr int kMaxRuns = 4 * kTileTokens / kSubtileTokens;
  struct Run {
    const uint8_t *begin, *end;
  };
  Run runs_[kMaxRuns];
  int count_ = 0, next_ = 0;
};

}  // namespace
}  // namespace polykv
