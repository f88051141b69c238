// Keys and values that the next attention reads, fetched while a product is computed: where a few rows share each
// weight, the processor computes and memory is idle, and in attention it is the other way round.
#pragma once
#include "isa/simd.h"
#include "ops/kv_cache.h"
#include "plan/types.h"

namespace quire {
namespace {

// Of a step; with more, attention computes too. On tile registers products of more rows lose more by fetching than
// attention gains: steps of 64 streams with 128 positions took 2 to 3 % longer.
#if defined(QUIRE_TILES)
constexpr int64_t kAheadRows = 32;
#else
constexpr int64_t kAheadRows = 64;
#endif

// Goes through KvAhead's blocks of a thread, some bytes at a time. Threads take the requests that attention gives them.
class KvFetch {
 public:
  KvFetch() = default;
  KvFetch(const KvAhead& ahead, const Context& context) : ahead_(&ahead), step_(context.step) {
    if (ahead.begin == ahead.end || step_->num_tokens > kAheadRows) return;
    block_bytes_ = kv_layer_bytes(ahead.kv.format, ahead.kv.block_size, ahead.kv.num_kv_heads, ahead.kv.head_size);
    int64_t total = 0;
    for (int64_t r = 0; r < step_->num_requests; ++r) total += end_block(r) - first_block(r);
    const Range mine = share(total, context);
    const int64_t all = mine.end - mine.begin, most = context.ahead_bytes / block_bytes_,
                  count = all < most ? all : most;
    const int64_t first = part(count, ahead.begin);
    int64_t skipped = mine.begin + first;
    left_ = part(count, ahead.end) - first;
    for (; left_ > 0 && skipped >= end_block(request_) - first_block(request_); ++request_) {
      skipped -= end_block(request_) - first_block(request_);
    }
    if (left_ > 0) block_ = first_block(request_) + skipped;
  }

  // The next bytes, at most `bytes`; none when all are done.
  struct Bytes {
    const std::byte *begin, *end;
  };
  Bytes take(int64_t bytes) {
    if (at_ == end_) next_block();
    const std::byte* begin = at_;
    at_ = end_ - at_ < bytes ? end_ : at_ + bytes;
    return {begin, at_};
  }

 private:
  static int64_t part(int64_t count, double share) { return static_cast<int64_t>(static_cast<double>(count) * share); }
  int64_t first_block(int64_t r) const {
    const int64_t low = step_->starts[r] - ahead_->window + 1;
    return ahead_->window == 0 || low < 0 ? 0 : low / ahead_->kv.block_size;
  }
  int64_t end_block(int64_t r) const {
    return (step_->starts[r] + step_->counts[r] + ahead_->kv.block_size - 1) / ahead_->kv.block_size;
  }
  void next_block() {
    if (left_ == 0) return;
    if (block_ == end_block(request_)) block_ = first_block(++request_);
    const KvLayer& kv = ahead_->kv;
    at_ = kv.base + step_->block_table(kv.group, request_)[block_++] * kv.block_stride_bytes;
    end_ = at_ + block_bytes_;
    --left_;
  }

  const KvAhead* ahead_ = nullptr;
  const Step* step_ = nullptr;
  int64_t request_ = 0, block_ = 0, left_ = 0, block_bytes_ = 0;
  const std::byte *at_ = nullptr, *end_ = nullptr;
};

}  // namespace
}  // namespace quire
