// SPDX-License-Identifier: Apache-2.0
// Walks the block tables tile by tile and groups the requests by the blocks they read.
//
// Equal blocks are all that matters: where sequences are in the same blocks, their keys
// and values are the same bytes, whatever came before. So the result is a forest for
// full attention, where sequences only ever part, and stays right for sliding windows,
// whose tables begin at different tiles. Linear in requests x shared tiles.
#include "polykv/forest.h"

#include <algorithm>
#include <vector>

#include "polykv/kernel_table.h"

namespace polykv {
namespace {

constexpr int kNone = -1;

int passes(int64_t rows) { return static_cast<int>((rows + kMaxRows - 1) / kMaxRows); }

// Requests by block number; cleared in no time by starting a new generation.
class BlockMap {
 public:
  explicit BlockMap(int num_reqs) {
    size_t size = 4;
    while (size < 2 * static_cast<size_t>(num_reqs)) {
      size *= 2;
      --shift_;
    }
    slots_.resize(size);
  }
  void clear() { ++generation_; }

  // The request that came first with this block and of which `same` is true; `request`
  // if there is none.
  template <typename Same>
  int find_or_insert(int32_t block, int request, Same same) {
    // The high bits of the product: its low ones are those of the block, in which
    // requests with equally many blocks, one behind the other, agree.
    size_t i = static_cast<uint32_t>(block) * 2654435769u >> shift_;
    while (slots_[i].generation == generation_) {
      if (slots_[i].block == block && same(slots_[i].request)) return slots_[i].request;
      i = (i + 1) & (slots_.size() - 1);
    }
    slots_[i] = {generation_, block, request};
    return request;
  }

 private:
  struct Slot {
    int64_t generation = 0;
    int32_t block = 0;
    int request = 0;
  };
  std::vector<Slot> slots_;
  int64_t generation_ = 0;
  int shift_ = 30;
};

// What the walk knows of one request.
struct Request {
  int32_t query_len;
  int32_t seq_len;
  int32_t first_tile = 0, last_tile = 0;  // [first, last): all its queries see these
  int segment = kNone;                    // that it was in at the previous tile
  int leader = 0;                         // first request of its group at this tile
  int next = kNone;                       // the group's next member
  bool fills_passes = false;              // its rows alone fill a pass: no member
};

// The requests whose tile is in the same blocks, kept at their leader.
struct Group {
  int requests;  // members and those that fill passes alone
  int members;
  int first, last;  // of the members
  int64_t rows;     // of the members
  int segment;  // the members' segment at the previous tile, if it is one and the same
  bool same_segment;
};

class ForestBuilder {
 public:
  explicit ForestBuilder(const ForestArgs& args)
      : args_(args),
        requests_(args.num_reqs),
        groups_(args.num_reqs),
        map_(args.num_reqs) {
    for (int r = 0; r < args.num_reqs; ++r) {
      Request& request = requests_[r];
      request.query_len = args.query_start_loc[r + 1] - args.query_start_loc[r];
      request.seq_len = args.seq_lens[r];
      if (request.query_len <= 0) continue;  // padding, whose length may be anything
      const int context = request.seq_len - request.query_len;
      const int begin =
          args.sliding_window > 0 ? std::max(0, context + 1 - args.sliding_window) : 0;
      request.first_tile = begin / kTileTokens;
      request.last_tile = (context + 1) / kTileTokens;
      request.fills_passes = request.query_len * args.group >= kMaxRows;
      last_tile_ = std::max(last_tile_, request.last_tile);
      count(args.stats->unshared_pairs[kOwnToken], request, context, request.seq_len);
      count(args.stats->unshared_pairs[kNoOtherReader], request, 0, context);
    }
  }

  int64_t build() {
    for (int tile = 0; tile < last_tile_; ++tile) {
      const int largest = group(tile);
      // Sequences that have parted do not meet again, except behind a window's start.
      if (largest < 2 && args_.sliding_window <= 0) break;
      if (!extend(tile)) return -1;
    }
    finish_stats();
    return num_segments_;
  }

 private:
  bool active(const Request& request, int tile) const {
    return request.first_tile <= tile && tile < request.last_tile;
  }

  // Adds the pairs of the request's queries and cached tokens begin..end.
  void count(int64_t& pairs, const Request& request, int64_t begin, int64_t end) const {
    const int64_t context = request.seq_len - request.query_len;
    if (args_.sliding_window <= 0 && end <= context + 1) {
      pairs += request.query_len * (end - begin);
      return;
    }
    for (int64_t seen = context + 1; seen <= request.seq_len; ++seen) {
      const int64_t first = args_.sliding_window > 0
                                ? std::max(begin, seen - args_.sliding_window)
                                : begin;
      pairs += std::max<int64_t>(0, std::min(end, seen) - first);
    }
  }

  const int32_t* table(int request) const {
    return args_.block_table + request * args_.block_table_stride;
  }

  bool same_blocks(int a, int b, int tile) const {
    const int first = tile * kTileTokens / args_.block_size;
    const int last = ((tile + 1) * kTileTokens - 1) / args_.block_size;
    return std::equal(table(a) + first, table(a) + last + 1, table(b) + first);
  }

  // Finds the groups of a tile; returns the size of the largest.
  int group(int tile) {
    const int last_block = ((tile + 1) * kTileTokens - 1) / args_.block_size;
    int largest = 0;
    map_.clear();
    for (int r = 0; r < args_.num_reqs; ++r) {
      Request& request = requests_[r];
      if (!active(request, tile)) continue;
      // Behind a window's start, tables may differ before they are the same.
      const int leader = map_.find_or_insert(table(r)[last_block], r, [&](int other) {
        return same_blocks(other, r, tile);
      });
      request.leader = leader;
      request.next = kNone;
      Group& group = groups_[leader];
      if (leader == r) group = {0, 0, kNone, kNone, 0, kNone, true};
      largest = std::max(largest, ++group.requests);
      if (!request.fills_passes) join(group, r);
    }
    return largest;
  }

  void join(Group& group, int r) {
    const Request& request = requests_[r];
    if (group.members++ == 0) {
      group.first = r;
      group.segment = request.segment;
    } else {
      requests_[group.last].next = r;
    }
    group.last = r;
    group.rows += request.query_len * args_.group;
    group.same_segment &= request.segment == group.segment;
  }

  // Apart, each member takes a pass of its own.
  bool gains(const Group& group) const { return passes(group.rows) < group.members; }

  // Lets the groups go on with their segment, or begin one; false: no room for it.
  bool extend(int tile) {
    for (int r = 0; r < args_.num_reqs; ++r) {
      Request& request = requests_[r];
      if (!active(request, tile)) {
        request.segment = kNone;
        continue;
      }
      const Group& group = groups_[request.leader];
      if (request.fills_passes) {
        if (group.requests > 1) no_gain(request, tile);
      } else if (group.first == r && !extend_group(group, tile)) {
        return false;
      }
    }
    return true;
  }

  bool extend_group(const Group& group, int tile) {
    if (!gains(group)) {
      for_each_member(group, [&](Request& request, int) {
        if (group.requests > 1) no_gain(request, tile);
        request.segment = kNone;
      });
      return true;
    }
    if (group.same_segment && group.segment != kNone &&
        args_.segments[group.segment].num_readers == group.members) {
      args_.segments[group.segment].end_tile = tile + 1;
      return true;
    }
    if (num_segments_ == args_.max_segments ||
        num_readers_ + group.members > args_.max_readers) {
      return false;
    }
    const int segment = static_cast<int>(num_segments_++);
    args_.segments[segment] = {tile, tile + 1, static_cast<int32_t>(num_readers_),
                               group.members};
    continued_.push_back(false);
    for_each_member(group, [&](Request& request, int r) {
      if (request.segment != kNone) continued_[request.segment] = true;
      request.segment = segment;
      args_.readers[num_readers_++] = r;
    });
    return true;
  }

  template <typename Fn>
  void for_each_member(const Group& group, Fn fn) {
    for (int r = group.first; r != kNone; r = requests_[r].next) fn(requests_[r], r);
  }

  void no_gain(const Request& request, int tile) {
    move_pairs(request, tile, tile + 1, args_.stats->unshared_pairs[kNoGain]);
  }

  // Pairs counted as unread by others so far are something else.
  void move_pairs(const Request& request, int begin_tile, int end_tile,
                  int64_t& to) const {
    int64_t pairs = 0;
    count(pairs, request, int64_t{begin_tile} * kTileTokens,
          std::min<int64_t>(int64_t{end_tile} * kTileTokens,
                            request.seq_len - request.query_len));
    args_.stats->unshared_pairs[kNoOtherReader] -= pairs;
    to += pairs;
  }

  void finish_stats() {
    SharingStats& stats = *args_.stats;
    for (int64_t s = 0; s < num_segments_; ++s) {
      const SharedSegment& segment = args_.segments[s];
      const int64_t tokens =
          int64_t{segment.end_tile - segment.begin_tile} * kTileTokens;
      stats.physical_tokens += tokens;
      stats.logical_tokens += tokens * segment.num_readers;
      stats.max_readers = std::max<int64_t>(stats.max_readers, segment.num_readers);
      stats.distinct_prefixes += !continued_[s];
      for (int i = 0; i < segment.num_readers; ++i) {
        move_pairs(requests_[args_.readers[segment.first_reader + i]],
                   segment.begin_tile, segment.end_tile, stats.shared_pairs);
      }
    }
  }

  const ForestArgs& args_;
  std::vector<Request> requests_;
  std::vector<Group> groups_;  // by leader
  BlockMap map_;
  std::vector<bool> continued_;  // of each segment: by another one
  int32_t last_tile_ = 0;
  int64_t num_segments_ = 0, num_readers_ = 0;
};

}  // namespace

int64_t build_forest(const ForestArgs& args) {
  *args.stats = {};
  return ForestBuilder(args).build();
}

}  // namespace polykv
