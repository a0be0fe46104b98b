// SPDX-License-Identifier: Apache-2.0
// Memory of running softmax states: of one pass, and of the rows between two passes.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "polykv/kernel_table.h"

namespace polykv {

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

inline void copy_state(const RowState& from, RowState to, int rows, int head_dim) {
  std::memcpy(to.max, from.max, rows * sizeof(float));
  std::memcpy(to.sum, from.sum, rows * sizeof(float));
  std::memcpy(to.acc, from.acc, static_cast<size_t>(rows) * head_dim * sizeof(float));
}

// The states of all rows of a batch, where they wait for their next pass. Never
// initialised: rows are written before they are read.
class StateStore {
 public:
  StateStore(int num_kv_heads, int64_t rows_per_head, int head_dim)
      : rows_per_head_(rows_per_head), head_dim_(head_dim) {
    const int64_t rows = num_kv_heads * rows_per_head;
    max_.reset(new float[rows]);
    sum_.reset(new float[rows]);
    acc_.reset(new float[rows * head_dim]);
  }

  // From row `row` of a KV head on.
  RowState at(int kv_head, int64_t row) {
    const int64_t i = kv_head * rows_per_head_ + row;
    return {max_.get() + i, sum_.get() + i, acc_.get() + i * head_dim_};
  }

 private:
  int64_t rows_per_head_;
  int head_dim_;
  std::unique_ptr<float[]> max_, sum_, acc_;
};

}  // namespace polykv
