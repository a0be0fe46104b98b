// SPDX-License-Identifier: Apache-2.0
// A batch as passes over the cache: which rows read which tiles together, in which
// order. Nothing here does arithmetic on them.
#pragma once

#include <cstdint>
#include <vector>

#include "polykv/kernel_table.h"

namespace polykv {

// Rows over consecutive tiles. A row's passes follow each other in ascending order of
// tiles; its state waits in a store between them.
struct Pass {
  RowBlock rows;
  int begin_tile, end_tile;
  bool last;  // of all its rows, which are then complete
};

struct PassPlan {
  std::vector<RowRun> runs;
  std::vector<uint8_t> fresh;  // of each run: no pass of these rows came before
  std::vector<Pass> passes;    // by level: a pass depends on those of lower levels only
  std::vector<int> levels;     // pass numbers at which a level begins, and the end

  bool is_fresh(const RowRun* run) const { return fresh[run - runs.data()]; }
};

PassPlan plan_passes(const AttentionArgs& args);

}  // namespace polykv
