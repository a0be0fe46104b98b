// SPDX-License-Identifier: Apache-2.0
// Which thread does what. Any assignment gives the same bits: see attention-inl.h.
#include "schedule.h"

#include <omp.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace polykv {
namespace {

// At most this many partial results wait for their turn, so memory does
// not grow with the context.
constexpr int kMaxPartials = 512;

int thread_count(int requested) {
  return requested > 0 ? requested : omp_get_max_threads();
}

struct Item {
  RowBlock rows;
  int first_split;  // first split that any of the rows attends to
  int last_split;   // exclusive
};

// Owns the memory of the RowState of up to `max_rows` rows.
class StateBuffer {
 public:
  StateBuffer(int max_rows, int head_dim)
      : head_dim_(head_dim),
        max_(round_up(max_rows)),
        sum_(round_up(max_rows)),
        acc_(static_cast<size_t>(round_up(max_rows)) * head_dim) {}

  RowState neutral(int rows) {
    std::fill_n(max_.begin(), round_up(rows), -std::numeric_limits<float>::infinity());
    std::fill_n(sum_.begin(), round_up(rows), 0.0f);
    std::fill_n(acc_.begin(), static_cast<size_t>(rows) * head_dim_, 0.0f);
    return state();
  }
  RowState state() { return {max_.data(), sum_.data(), acc_.data()}; }

 private:
  static int round_up(int rows) { return (rows + 15) / 16 * 16; }  // whole vectors

  int head_dim_;
  std::vector<float> max_, sum_, acc_;
};

int max_rows(const std::vector<Item>& items) {
  int rows = 0;
  for (const Item& item : items) rows = std::max(rows, item.rows.num_rows);
  return rows;
}

int split_of(int64_t position) { return static_cast<int>(position / kSplitTokens); }

std::vector<Item> make_items(const AttentionArgs& args) {
  const int group = args.num_heads / args.cache.num_kv_heads;
  std::vector<Item> items;
  for (int request = 0; request < args.num_reqs; ++request) {
    const int query_len =
        args.query_start_loc[request + 1] - args.query_start_loc[request];
    const int64_t context = args.seq_lens[request] - query_len;
    const int rows = query_len * group;
    for (int head = 0; head < args.cache.num_kv_heads; ++head) {
      for (int row = 0; row < rows; row += kMaxRows) {
        const int count = std::min(kMaxRows, rows - row);
        const int64_t end = context + (row + count - 1) / group + 1;
        int64_t begin = 0;
        if (args.sliding_window > 0) {
          begin = std::max<int64_t>(0, context + row / group + 1 - args.sliding_window);
        }
        items.push_back(
            {{request, head, row, count}, split_of(begin), split_of(end - 1) + 1});
      }
    }
  }
  return items;
}

// Enough blocks for every thread: each folds its own splits.
void attend_whole(const KernelTable& table, const AttentionArgs& args,
                  const std::vector<Item>& items, int threads) {
  const int rows = max_rows(items);
#pragma omp parallel num_threads(threads)
  {
    StateBuffer buffer(rows, args.cache.head_dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = static_cast<int64_t>(items.size()) - 1; i >= 0; --i) {
      const Item& item = items[i];
      const RowState state = buffer.neutral(item.rows.num_rows);
      table.attend(args, item.rows, item.first_split, item.last_split, state);
      table.finish(args, item.rows, state);
    }
  }
}

// Few blocks over long sequences: their splits run in parallel, a wave at a time, and
// each block then folds its partial results in order.
void attend_splits(const KernelTable& table, const AttentionArgs& args,
                   const std::vector<Item>& items, int threads) {
  struct Part {
    int item, split;
  };
  std::vector<Part> parts;
  for (int i = 0; i < static_cast<int>(items.size()); ++i) {
    for (int s = items[i].first_split; s < items[i].last_split; ++s) {
      parts.push_back({i, s});
    }
  }
  const int num_parts = static_cast<int>(parts.size());
  const int wave = std::min(num_parts, kMaxPartials);
  const StateBuffer empty(max_rows(items), args.cache.head_dim);
  std::vector<StateBuffer> partials(wave, empty), totals(items.size(), empty);
  for (size_t i = 0; i < items.size(); ++i) totals[i].neutral(items[i].rows.num_rows);
  for (int start = 0; start < num_parts; start += wave) {
    const int count = std::min(wave, num_parts - start);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int p = 0; p < count; ++p) {
      const auto [item, split] = parts[start + p];
      const RowBlock& rows = items[item].rows;
      table.attend(args, rows, split, split + 1, partials[p].neutral(rows.num_rows));
    }
    for (int p = 0; p < count; ++p) {
      const int item = parts[start + p].item;
      table.merge(items[item].rows.num_rows, args.cache.head_dim, totals[item].state(),
                  partials[p].state());
    }
  }
  for (size_t i = 0; i < items.size(); ++i) {
    table.finish(args, items[i].rows, totals[i].state());
  }
}

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

void run_attention(const KernelTable& table, const AttentionArgs& args) {
  const std::vector<Item> items = make_items(args);
  const int threads = thread_count(args.num_threads);
  const bool many = static_cast<int>(items.size()) >= 4 * threads;
  if (threads == 1 || many) {
    attend_whole(table, args, items, threads);
  } else {
    attend_splits(table, args, items, threads);
  }
}

}  // namespace polykv
