// SPDX-License-Identifier: Apache-2.0
#include "passes.h"

#include <algorithm>
#include <utility>

#include "seen_tokens.h"

namespace polykv {
namespace {

// Rows of `total` per pass: as few passes as possible, then of equal size, in whole
// sub-blocks of 16.
int rows_per_pass(int total) {
  const int passes = (total + kMaxRows - 1) / kMaxRows;
  const int even = (total + passes - 1) / passes;
  return std::min(kMaxRows, (even + 15) / 16 * 16);
}

class Planner {
 public:
  explicit Planner(const AttentionArgs& args)
      : args_(args),
        group_(args.num_heads / args.cache.num_kv_heads),
        progress_(args.num_reqs) {
    for (int r = 0; r < args.num_reqs; ++r) progress_[r].tile = first_tile(r, 0);
  }

  PassPlan plan() {
    for (int s = 0; s < args_.num_segments; ++s) add_shared(args_.segments[s]);
    for (int r = 0; r < args_.num_reqs; ++r) add_private(r, kToTheEnd);
    return flatten();
  }

 private:
  static constexpr int kToTheEnd = -1;

  struct Progress {
    int tile = 0;   // where the next pass begins
    int level = 0;  // of the next pass
    bool fresh = true;
  };
  // A pass whose runs are still counted from the start of `runs`.
  struct Draft {
    int kv_head, first_run, num_runs, num_rows, begin_tile, end_tile;
    bool last;
  };

  int query_len(int request) const {
    return args_.query_start_loc[request + 1] - args_.query_start_loc[request];
  }
  int context(int request) const {
    return args_.seq_lens[request] - query_len(request);
  }

  // What row `row` of the request attends to of the cache.
  TokenSpan cached(int request, int row) const {
    return seen_tokens(args_, request, context(request) + row / group_).cached;
  }
  int first_tile(int request, int row) const {
    return static_cast<int>(cached(request, row).begin / kTileTokens);
  }
  int tiles_end(int request, int row) const {
    return static_cast<int>((cached(request, row).end + kTileTokens - 1) / kTileTokens);
  }

  void push(int level, const Draft& draft) {
    if (level >= static_cast<int>(drafts_.size())) drafts_.resize(level + 1);
    drafts_[level].push_back(draft);
  }

  void push_run(const RowRun& run) {
    plan_.runs.push_back(run);
    plan_.fresh.push_back(progress_[run.request].fresh);
  }

  // All rows of one request up to `end_tile`, or to the end of the sequence.
  void add_private(int request, int end_tile) {
    const int rows = query_len(request) * group_;
    if (rows == 0) return;
    Progress& progress = progress_[request];
    const bool last = end_tile == kToTheEnd;
    const int step = last && rows > kMaxRows ? kMaxRows : rows_per_pass(rows);
    for (int head = 0; head < args_.cache.num_kv_heads; ++head) {
      for (int row = 0; row < rows; row += step) {
        const int count = std::min(step, rows - row);
        const int begin = std::max(progress.tile, first_tile(request, row));
        const int end = last ? tiles_end(request, row + count - 1) : end_tile;
        const int first_run = static_cast<int>(plan_.runs.size());
        push_run({request, row, count});
        push(progress.level, {head, first_run, 1, count, begin, end, last});
      }
    }
    advance(request, progress.level + 1, end_tile);
  }

  void advance(int request, int level, int tile) {
    progress_[request] = {tile, level, false};
  }

  void add_shared(const SharedSegment& segment) {
    const int32_t* readers = args_.readers + segment.first_reader;
    int level = 0, total = 0;
    for (int i = 0; i < segment.num_readers; ++i) {
      if (progress_[readers[i]].tile < segment.begin_tile) {
        add_private(readers[i], segment.begin_tile);
      }
      level = std::max(level, progress_[readers[i]].level);
      total += query_len(readers[i]) * group_;
    }
    for (int head = 0; head < args_.cache.num_kv_heads; ++head) {
      stack(segment, readers, rows_per_pass(total), level, head);
    }
    for (int i = 0; i < segment.num_readers; ++i) {
      advance(readers[i], level + 1, segment.end_tile);
    }
  }

  // The readers' rows one after the other, cut into passes of `step` rows.
  void stack(const SharedSegment& segment, const int32_t* readers, int step, int level,
             int head) {
    Draft draft{head,
                static_cast<int>(plan_.runs.size()),
                0,
                0,
                segment.begin_tile,
                segment.end_tile,
                false};
    const auto close = [&] {
      if (draft.num_runs == 0) return;
      push(level, draft);
      draft.first_run += draft.num_runs;
      draft.num_runs = draft.num_rows = 0;
    };
    for (int i = 0; i < segment.num_readers; ++i) {
      const int rows = query_len(readers[i]) * group_;
      for (int row = 0; row < rows;) {
        const int count = std::min(rows - row, step - draft.num_rows);
        push_run({readers[i], row, count});
        ++draft.num_runs;
        draft.num_rows += count;
        row += count;
        if (draft.num_rows == step) close();
      }
    }
    close();
  }

  PassPlan flatten() {
    plan_.levels.push_back(0);
    for (const auto& level : drafts_) {
      for (const Draft& draft : level) {
        const RowBlock rows{plan_.runs.data() + draft.first_run, draft.num_runs,
                            draft.num_rows, draft.kv_head};
        plan_.passes.push_back({rows, draft.begin_tile, draft.end_tile, draft.last});
      }
      plan_.levels.push_back(static_cast<int>(plan_.passes.size()));
    }
    return std::move(plan_);
  }

  const AttentionArgs& args_;
  const int group_;
  std::vector<Progress> progress_;
  std::vector<std::vector<Draft>> drafts_;  // by level
  PassPlan plan_;
};

}  // namespace

PassPlan plan_passes(const AttentionArgs& args) { return Planner(args).plan(); }

}  // namespace polykv
