// SPDX-License-Identifier: Apache-2.0
// Stores and attends with every instruction set that this CPU has, and compares bytes
// with what the scalar kernels give. Prints a line per instruction set; exit status 1
// tells of a difference. Linked with the library as it is installed.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../random.h"
#include "polykv/args.h"
#include "polykv/layout.h"

using namespace polykv;

extern "C" {
int polykv_num_isas();
const char* polykv_isa_name(int isa);
int polykv_isa_supported(int isa);
const char* polykv_reshape_and_cache(int isa, const StoreArgs* args);
const char* polykv_paged_attention(int isa, const AttentionArgs* args);
}

namespace {

struct Request {
  int queries, length;
};

struct Case {
  Format format;
  int head_dim, block_size, group;
  DType dtype;
  int window;
  bool fast, transform;
  std::vector<Request> requests;
};

constexpr int kKvHeads = 2;

size_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// `count` normal numbers as `dtype`; halves are made of bits that are finite as such.
std::vector<uint8_t> rows(Random& random, int64_t count, DType dtype) {
  std::vector<uint8_t> out(count * size_of(dtype));
  for (int64_t i = 0; i < count; ++i) {
    const float x = random.normal();
    if (dtype == DType::kFloat32) {
      std::memcpy(&out[i * 4], &x, 4);
    } else if (dtype == DType::kBFloat16) {
      std::memcpy(&out[i * 2], reinterpret_cast<const uint8_t*>(&x) + 2, 2);
    } else {
      const auto half = static_cast<uint16_t>((random.bits() & 0x83ff) | 15 << 10);
      std::memcpy(&out[i * 2], &half, 2);
    }
  }
  return out;
}

// The tensors of one case, as an engine would hand them over.
struct Batch {
  const Case& shape;
  int tokens = 0, queries = 0, width = 0, blocks = 1;  // block 0 is nobody's
  std::vector<uint8_t> key, value, query, garbage;
  std::vector<int64_t> slots;
  std::vector<int32_t> table, seq_lens, starts{0};
  std::vector<float> multipliers;
  int64_t tile_bytes;
  // Raw rows: those of the chunks, and pages that all requests read from.
  static constexpr int kNumPages = 5;
  std::vector<uint8_t> raw_key, raw_value, raw_cache;
  std::vector<int32_t> sink_tokens, recent_begin, pages;
  int32_t granules;

  explicit Batch(const Case& c, Random& random) : shape(c) {
    for (const Request& r : c.requests) {
      tokens += r.length;
      queries += r.queries;
      seq_lens.push_back(r.length);
      starts.push_back(queries);
      width = std::max(width, (r.length + c.block_size - 1) / c.block_size);
    }
    table.assign(c.requests.size() * width, 0);
    for (size_t i = 0; i < c.requests.size(); ++i) {
      for (int t = 0; t < c.requests[i].length; ++t) {
        if (t % c.block_size == 0) table[i * width + t / c.block_size] = blocks++;
        slots.push_back(int64_t{blocks - 1} * c.block_size + t % c.block_size);
      }
    }
    const int64_t row = int64_t{kKvHeads} * c.head_dim;
    key = rows(random, tokens * row, c.dtype);
    value = rows(random, tokens * row, c.dtype);
    query = rows(random, queries * row * c.group, c.dtype);
    for (int64_t i = 0; i < row; ++i) {
      multipliers.push_back(std::ldexp(1.0f, static_cast<int>(random.bits() % 5) - 2));
    }
    tile_bytes = TileLayout(c.format, c.head_dim, c.block_size).tile_bytes;
    garbage.resize(blocks * kKvHeads * tile_bytes);
    for (uint8_t& byte : garbage) byte = static_cast<uint8_t>(random.bits());
    raw_key = rows(random, queries * row, c.dtype);
    raw_value = rows(random, queries * row, c.dtype);
    raw_cache = rows(random, kNumPages * 2 * row * kWindowPageTokens, c.dtype);
    sink_tokens.assign(c.requests.size(), 4);
    recent_begin.assign(c.requests.size(), 0);
    granules = width * c.block_size / kWindowPageTokens + 1;
    for (size_t i = 0; i < c.requests.size() * granules; ++i) {
      pages.push_back(static_cast<int32_t>(i % kNumPages));
    }
  }

  Cache cache(std::vector<uint8_t>& bytes) const {
    return {bytes.data(), blocks,           kKvHeads * tile_bytes, tile_bytes,
            kKvHeads,     shape.block_size, shape.head_dim,        shape.format};
  }

  RowTransform transform() const {
    if (!shape.transform) return {};
    return {nullptr, multipliers.data(), nullptr, 1};
  }

  std::vector<uint8_t> store(int isa) const {
    std::vector<uint8_t> bytes = garbage;
    StoreArgs args{};
    args.cache = cache(bytes);
    args.key = key.data();
    args.value = value.data();
    args.slot_mapping = slots.data();
    args.num_tokens = tokens;
    args.key_token_stride = args.value_token_stride = kKvHeads * shape.head_dim;
    args.key_head_stride = args.value_head_stride = shape.head_dim;
    args.key_transform = transform();
    args.dtype = shape.dtype;
    args.num_threads = 1;
    check(polykv_reshape_and_cache(isa, &args));
    return bytes;
  }

  // With windows of full precision: four sinks and the last 40 tokens.
  void add_windows(AttentionArgs& args) const {
    const int64_t row = shape.head_dim, head = row * kWindowPageTokens;
    args.windows = {sink_tokens.data(),
                    recent_begin.data(),
                    pages.data(),
                    pages.data(),
                    granules,
                    granules,
                    granules,
                    granules,
                    40};
    args.raw = {raw_key.data(),
                raw_value.data(),
                raw_cache.data(),
                kKvHeads * row,
                row,
                kKvHeads * row,
                row,
                kNumPages,
                2 * kKvHeads * head,
                kKvHeads * head,
                head};
  }

  std::vector<uint8_t> attend(int isa, std::vector<uint8_t> bytes, bool windows) const {
    std::vector<uint8_t> output(query.size());
    AttentionArgs args{};
    args.cache = cache(bytes);
    args.query = query.data();
    args.output = output.data();
    args.block_table = table.data();
    args.seq_lens = seq_lens.data();
    args.query_start_loc = starts.data();
    args.query_head_stride = args.output_head_stride = shape.head_dim;
    args.query_token_stride = int64_t{kKvHeads} * shape.group * shape.head_dim;
    args.output_token_stride = args.query_token_stride;
    args.block_table_stride = args.block_table_width = width;
    args.num_rows = queries;
    args.query_transform = transform();
    args.num_reqs = static_cast<int32_t>(seq_lens.size());
    args.num_heads = kKvHeads * shape.group;
    args.sliding_window = shape.window;
    args.dtype = shape.dtype;
    args.scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
    args.fast = shape.fast;
    args.num_threads = 1;
    if (windows) add_windows(args);
    check(polykv_paged_attention(isa, &args));
    return output;
  }

  static void check(const char* error) {
    if (error == nullptr) return;
    std::printf("refused: %s\n", error);
    std::exit(2);
  }
};

std::vector<Case> grid() {
  const std::vector<Request> mixed = {{1, 300}, {7, 150}, {1, 16}, {3, 3}, {0, 0}};
  const std::vector<Request> one = {{1, 200}}, prefill = {{21, 21}, {2, 140}};
  const auto bf16 = DType::kBFloat16, fp16 = DType::kFloat16, fp32 = DType::kFloat32;
  std::vector<Case> cases;
  for (const Format& format : {Format{8, 3, 1}, {8, 4, 1}, {7, 4, 1}, {8, 8, 0}}) {
    cases.push_back({format, 64, 32, 3, bf16, -1, false, false, mixed});
    cases.push_back({format, 64, 16, 8, fp32, -1, true, true, one});
    cases.push_back({format, 128, 48, 4, fp16, 100, false, true, prefill});
    cases.push_back({format, 128, 16, 2, bf16, -1, true, false, mixed});
    cases.push_back({format, 256, 32, 1, fp32, 40, false, false, prefill});
    cases.push_back({format, 80, 16, 3, bf16, -1, false, true, prefill});
    cases.push_back({format, 112, 32, 2, fp16, -1, true, false, one});
  }
  return cases;
}

bool differs(const char* what, const char* isa, size_t number,
             const std::vector<uint8_t>& got, const std::vector<uint8_t>& expected) {
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) continue;
    std::printf("%s: case %zu, %s: byte %zu of %zu is %d, scalar gives %d\n", isa,
                number, what, i, got.size(), got[i], expected[i]);
    return true;
  }
  return false;
}

}  // namespace

int main() {
  const int scalar = polykv_num_isas() - 1;
  const std::vector<Case> cases = grid();
  int status = 0;
  for (int isa = 0; isa < scalar; ++isa) {
    const char* name = polykv_isa_name(isa);
    if (!polykv_isa_supported(isa)) {
      std::printf("%s: not on this CPU\n", name);
      continue;
    }
    size_t equal = 0;
    for (size_t number = 0; number < cases.size(); ++number) {
      Random random;
      const Batch batch(cases[number], random);
      const std::vector<uint8_t> bytes = batch.store(scalar);
      if (differs("store", name, number, batch.store(isa), bytes)) continue;
      const auto agrees = [&](const char* what, bool windows) {
        return !differs(what, name, number, batch.attend(isa, bytes, windows),
                        batch.attend(scalar, bytes, windows));
      };
      equal += agrees("attention", false) && agrees("attention with windows", true);
    }
    std::printf("%s: %zu of %zu cases equal\n", name, equal, cases.size());
    if (equal < cases.size()) status = 1;
  }
  return status;
}
