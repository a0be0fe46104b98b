// SPDX-License-Identifier: Apache-2.0
// Which thread does what. Any assignment gives the same bits: see attention-inl.h.
#include "schedule.h"

#include <omp.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "passes.h"
#include "row_states.h"

namespace polykv {
namespace {

// At most this many partial results wait for their turn, so memory does
// not grow with the context.
constexpr int kMaxPartials = 512;

int thread_count(int requested) {
  return requested > 0 ? requested : omp_get_max_threads();
}

// The states of one pass: `total` of its finished splits, `split`, the open one, and
// with windows `raw`.
struct PassState {
  StateBuffer total, split, raw;
  PassState(int max_rows, int head_dim, bool windows)
      : total(max_rows, head_dim),
        split(max_rows, head_dim),
        raw(windows ? max_rows : 0, head_dim) {}
};

class Runner {
 public:
  // `original`: with the queries as the model made them.
  Runner(const KernelTable& table, const AttentionArgs& args,
         const AttentionArgs& original)
      : table_(table),
        args_(args),
        original_(original),
        has_windows_(args.windows.sink_tokens != nullptr),
        plan_(plan_passes(args)),
        head_dim_(args.cache.head_dim),
        group_(args.num_heads / args.cache.num_kv_heads),
        threads_(thread_count(args.num_threads)),
        stored_rows_(args.num_segments > 0 ? args.num_rows * group_ : 0),
        totals_(args.cache.num_kv_heads, stored_rows_, head_dim_),
        splits_(args.cache.num_kv_heads, stored_rows_, head_dim_) {
    for (const Pass& pass : plan_.passes) {
      max_rows_ = std::max(max_rows_, pass.rows.num_rows);
    }
  }

  void run() {
    for (size_t level = 0; level + 1 < plan_.levels.size(); ++level) {
      const int begin = plan_.levels[level], end = plan_.levels[level + 1];
      if (threads_ == 1 || end - begin >= 4 * threads_) {
        run_whole(begin, end);
      } else {
        run_splits(begin, end);
      }
    }
  }

 private:
  // Takes over where the rows' earlier passes ended.
  void load(const Pass& pass, PassState& state) {
    RowState total = state.total.neutral(pass.rows.num_rows);
    RowState split = state.split.neutral(pass.rows.num_rows);
    for_each_run(pass, total, split, [&](const RowRun& run, RowState t, RowState s) {
      if (plan_.is_fresh(&run)) return;
      copy_state(stored(totals_, pass, run), t, run.num_rows, head_dim_);
      copy_state(stored(splits_, pass, run), s, run.num_rows, head_dim_);
    });
  }

  // Leaves the states to the rows' next passes, or writes the rows' results.
  void close(const Pass& pass, PassState& state) {
    const RowState total = state.total.state(), split = state.split.state();
    if (pass.last) {
      table_.merge(pass.rows.num_rows, head_dim_, total, split);
      const RowState none = {nullptr, nullptr, nullptr};
      table_.finish(args_, pass.rows, total, has_windows_ ? state.raw.state() : none);
      return;
    }
    for_each_run(pass, total, split, [&](const RowRun& run, RowState t, RowState s) {
      copy_state(t, stored(totals_, pass, run), run.num_rows, head_dim_);
      copy_state(s, stored(splits_, pass, run), run.num_rows, head_dim_);
    });
  }

  // Once for each row: its last pass is over rows of its request alone.
  void attend_raw(const Pass& pass, PassState& state) const {
    if (!has_windows_ || !pass.last) return;
    table_.attend_raw(original_, pass.rows, state.raw.neutral(pass.rows.num_rows));
  }

  template <typename Fn>
  void for_each_run(const Pass& pass, RowState total, RowState split, Fn fn) const {
    int row = 0;
    for (int i = 0; i < pass.rows.num_runs; ++i) {
      const RowRun& run = pass.rows.runs[i];
      fn(run, advanced(total, row), advanced(split, row));
      row += run.num_rows;
    }
  }

  RowState advanced(RowState state, int rows) const {
    return {state.max + rows, state.sum + rows,
            state.acc + static_cast<int64_t>(rows) * head_dim_};
  }

  RowState stored(StateStore& store, const Pass& pass, const RowRun& run) const {
    const int64_t first = int64_t{args_.query_start_loc[run.request]} * group_;
    return store.at(pass.rows.kv_head, first + run.row_begin);
  }

  // Enough passes for every thread: each runs whole ones.
  void run_whole(int begin, int end) {
#pragma omp parallel num_threads(threads_)
    {
      PassState state(max_rows_, head_dim_, has_windows_);
#pragma omp for schedule(dynamic, 1)
      for (int i = end - 1; i >= begin; --i) {
        const Pass& pass = plan_.passes[i];
        load(pass, state);
        table_.attend(args_, pass.rows, pass.begin_tile, pass.end_tile,
                      state.total.state(), state.split.state());
        attend_raw(pass, state);
        close(pass, state);
      }
    }
  }

  // The tiles of a pass that lie in one split.
  struct Part {
    int pass;
    int begin_tile, end_tile;
    bool is_first;  // goes on with the open split that the pass began with
  };

  std::vector<Part> make_parts(int begin, int end) const {
    std::vector<Part> parts;
    for (int i = begin; i < end; ++i) {
      const Pass& pass = plan_.passes[i];
      for (int tile = pass.begin_tile; tile < pass.end_tile;) {
        const int next =
            std::min(pass.end_tile, (tile / kSplitTiles + 1) * kSplitTiles);
        parts.push_back({i, tile, next, tile == pass.begin_tile});
        tile = next;
      }
    }
    return parts;
  }

  // Few passes over long sequences: their splits run in parallel, a wave at a time, and
  // each pass then folds its partial results in order.
  void run_splits(int begin, int end) {
    const std::vector<Part> parts = make_parts(begin, end);
    const int num_parts = static_cast<int>(parts.size());
    const int wave = std::min(num_parts, kMaxPartials);
    const PassState empty(max_rows_, head_dim_, has_windows_);
    std::vector<PassState> states(end - begin, empty);
    std::vector<PassState> partials(wave, PassState(max_rows_, head_dim_, false));
    for (int i = begin; i < end; ++i) load(plan_.passes[i], states[i - begin]);
    for (int start = 0; start < num_parts; start += wave) {
      const int count = std::min(wave, num_parts - start);
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1)
      for (int p = 0; p < count; ++p) {
        const Part& part = parts[start + p];
        run_part(part, states[part.pass - begin], partials[p]);
      }
      for (int p = 0; p < count; ++p) {
        const Part& part = parts[start + p];
        fold_part(part, states[part.pass - begin], partials[p]);
      }
    }
    if (has_windows_) {
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1)
      for (int i = begin; i < end; ++i) attend_raw(plan_.passes[i], states[i - begin]);
    }
    for (int i = begin; i < end; ++i) close(plan_.passes[i], states[i - begin]);
  }

  void run_part(const Part& part, PassState& state, PassState& partial) {
    const RowBlock& rows = plan_.passes[part.pass].rows;
    partial.total.neutral(rows.num_rows);
    partial.split.neutral(rows.num_rows);
    if (part.is_first) {
      copy_state(state.split.state(), partial.split.state(), rows.num_rows, head_dim_);
    }
    table_.attend(args_, rows, part.begin_tile, part.end_tile, partial.total.state(),
                  partial.split.state());
  }

  void fold_part(const Part& part, PassState& state, PassState& partial) {
    const int rows = plan_.passes[part.pass].rows.num_rows;
    table_.merge(rows, head_dim_, state.total.state(), partial.total.state());
    // An incomplete split is the last of its pass, and is open now.
    copy_state(partial.split.state(), state.split.state(), rows, head_dim_);
  }

  const KernelTable& table_;
  const AttentionArgs &args_, &original_;
  const bool has_windows_;
  const PassPlan plan_;
  const int head_dim_, group_, threads_;
  const int64_t stored_rows_;
  int max_rows_ = 0;
  StateStore totals_, splits_;
};

}  // namespace

void run_store(const KernelTable& table, const StoreArgs& args) {
  constexpr int64_t kChunk = 16;
  const int threads = thread_count(args.num_threads);
  const int64_t chunks = (args.num_tokens + kChunk - 1) / kChunk;
  if (threads == 1 || chunks < 2) {
    table.store(args, 0, args.num_tokens);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t c = 0; c < chunks; ++c) {
    table.store(args, c * kChunk, std::min(args.num_tokens, (c + 1) * kChunk));
  }
}

namespace {

// Queries times their matrices, once per call: passes load their rows more than once.
std::unique_ptr<float[]> transformed_queries(const KernelTable& table,
                                             const AttentionArgs& args) {
  constexpr int64_t kChunk = 16;
  const int64_t first = args.query_start_loc[0];
  const int64_t last = args.query_start_loc[args.num_reqs];
  const int64_t row = int64_t{args.num_heads} * args.cache.head_dim;
  std::unique_ptr<float[]> out(new float[last * row]);
  const int64_t chunks = (last - first + kChunk - 1) / kChunk;
#pragma omp parallel for num_threads(thread_count(args.num_threads)) schedule(static)
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t begin = first + c * kChunk;
    table.transform_queries(args, begin, std::min(last, begin + kChunk), out.get());
  }
  return out;
}

}  // namespace

void run_attention(const KernelTable& table, const AttentionArgs& args) {
  if (args.query_transform.matrices == nullptr || args.num_reqs == 0) {
    return Runner(table, args, args).run();
  }
  const std::unique_ptr<float[]> query = transformed_queries(table, args);
  AttentionArgs plain = args;
  plain.query = query.get();
  plain.query_dtype = DType::kFloat32;
  plain.query_head_stride = args.cache.head_dim;
  plain.query_token_stride = int64_t{args.num_heads} * args.cache.head_dim;
  plain.query_transform = {};
  Runner(table, plain, args).run();
}

}  // namespace polykv
