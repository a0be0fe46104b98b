// SPDX-License-Identifier: Apache-2.0
// The exported C functions. ops/cpu.py checks dtypes, shapes and strides before it
// calls them; the values of slots, lengths and block numbers are checked here.
#include <cstdint>
#include <type_traits>

#include "cpu/check.h"
#include "cpu/dispatch.h"
#include "cpu/schedule.h"
#include "polykv/codebook.h"
#include "polykv/forest.h"
#include "polykv/layout.h"

using namespace polykv;

extern "C" {

// Sizes of the argument structs, for the mirror in ops/cpu.py to compare with.
int64_t polykv_sizeof_store_args() { return sizeof(StoreArgs); }
int64_t polykv_sizeof_attention_args() { return sizeof(AttentionArgs); }

int64_t polykv_sizeof_forest_args() { return sizeof(ForestArgs); }

int polykv_num_isas() { return num_kernel_tables(); }
const char* polykv_isa_name(int isa) { return kernel_table(isa).name; }
int polykv_isa_supported(int isa) { return kernel_table(isa).supported(); }

// Null when done; else what is wrong with the indices, and nothing was written. The
// text stays valid until the thread's next call.
const char* polykv_reshape_and_cache(int isa, const StoreArgs* args) {
  const char* error = check_slots(*args);
  if (error == nullptr) run_store(kernel_table(isa), *args);
  return error;
}
const char* polykv_paged_attention(int isa, const AttentionArgs* args) {
  const char* error = check_batch(*args);
  if (error == nullptr) run_attention(kernel_table(isa), *args);
  return error;
}

// Returns the number of segments, or -1 when they do not fit. What it finds is checked
// again by polykv_paged_attention.
int64_t polykv_build_forest(const ForestArgs* args) { return build_forest(*args); }

// The constants that formats/ also states, for the test that compares them.
void polykv_tile_layout(const Format* format, int64_t head_dim, int64_t block_size,
                        int64_t* out) {
  const TileLayout layout(*format, head_dim, block_size);
  out[0] = layout.value_codes;
  out[1] = layout.value_high;
  out[2] = layout.key_scales;
  out[3] = layout.value_scales;
  out[4] = layout.tile_bytes;
  out[5] = layout.key_high;
  out[6] = layout.key_minimums;
  out[7] = layout.value_minimums;
}
int polykv_head_dims(int32_t* out) {
  for (int i = 0; i < kNumHeadDims; ++i) out[i] = kHeadDims[i];
  return kNumHeadDims;
}
int polykv_codebook(int bits, int8_t* levels, float* boundaries) {
  const auto copy = [&](auto number) {
    constexpr int kBits = decltype(number)::value;
    for (int i = 0; i < 1 << kBits; ++i) levels[i] = Codebook<kBits>::kLevels[i];
    for (int j = 0; j + 1 < 1 << kBits; ++j) boundaries[j] = boundary<kBits>(j);
    return 1 << kBits;
  };
  switch (bits) {
    case 2:
      return copy(std::integral_constant<int, 2>{});
    case 3:
      return copy(std::integral_constant<int, 3>{});
    case 4:
      return copy(std::integral_constant<int, 4>{});
    default:
      return 0;
  }
}

}  // extern "C"
