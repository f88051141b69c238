#include "plan/plan.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>

namespace quire {
namespace {

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Bytes of keys and values that each thread may fetch for the next attention. They must still be in its caches then,
// and leave room for what products stream: a quarter of its part of a large last cache, 4 MiB of 32 for two threads.
// With 2 MiB there, steps of 64 streams take 5 % longer.
int64_t ahead_bytes(int64_t num_threads) {
  constexpr int64_t kLeast = 2 << 20, kMost = 8 << 20;
  long long kib = 0;
  // "32768K"; no file where there is no such cache. C++'s streams crash in a module that is linked statically to one
  // C++ runtime and loaded beside another.
  if (std::FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r"); file != nullptr) {
    if (std::fscanf(file, "%lld", &kib) != 1) kib = 0;
    std::fclose(file);
  }
  const int64_t bytes = kib * 1024 / num_threads / 4;
  return bytes < kLeast ? kLeast : bytes > kMost ? kMost : bytes;
}

}  // namespace

void wait_for_all(Barrier& barrier) { barrier.wait(); }
void fetch_first(Fetcher& fetcher) { fetcher.drop(); }
void fetch(Fetcher& fetcher, const std::byte* begin, int64_t num_bytes) { fetcher.fetch(begin, num_bytes); }

Plan::Plan(std::shared_ptr<ThreadPool> pool, int64_t max_tokens, int64_t max_requests)
    : max_tokens_(max_tokens),
      max_requests_(max_requests),
      pool_(std::move(pool)),
      derived_(static_cast<size_t>(max_requests + 1 + 3 * max_tokens)),
      scratch_memory_(new std::byte[static_cast<size_t>(kScratchBytes * pool_->num_threads() + 64)]),
      ahead_bytes_(ahead_bytes(pool_->num_threads())) {
  const auto address = reinterpret_cast<uintptr_t>(scratch_memory_.get());
  scratch_ = reinterpret_cast<std::byte*>((address + 63) / 64 * 64);
}

void Plan::push(int32_t op, const void* params, uint32_t mask) {
  const Op& of = *chosen_ops->ops[static_cast<size_t>(op)];
  Entry entry{op, mask, {}, {}};
  std::memcpy(entry.params, params, static_cast<size_t>(of.size));
  std::memcpy(entry.tile_params, params, static_cast<size_t>(of.size));
  for (const Field& field : std::span(of.fields, static_cast<size_t>(of.num_fields))) {
    if (field.kind != FieldKind::rows) continue;
    auto* rows = reinterpret_cast<Rows*>(entry.tile_params + field.offset);
    if (rows->type == RowType::q8) rows->type = RowType::bf16;
  }
  entries_.push_back(entry);
}

void Plan::derive() {
  int32_t* first_tokens = derived_.data();
  int32_t* token_ids = first_tokens + max_requests_ + 1;
  int32_t* positions = token_ids + max_tokens_;
  int32_t* token_requests = positions + max_tokens_;
  int32_t token = 0;
  for (int64_t r = 0; r < step_.num_requests; ++r) {
    first_tokens[r] = token;
    const int32_t* known = step_.tokens + step_.request_rows[r] * step_.tokens_stride;
    for (int32_t i = 0; i < step_.counts[r]; ++i, ++token) {
      positions[token] = step_.starts[r] + i;
      token_ids[token] = known[step_.starts[r] + i];
      token_requests[token] = static_cast<int32_t>(r);
    }
  }
  first_tokens[step_.num_requests] = token;
  step_.first_tokens = first_tokens;
  step_.token_ids = token_ids;
  step_.positions = positions;
  step_.token_requests = token_requests;
}

void Plan::run(Step step, uint32_t parts, int64_t* nanoseconds) {
  int64_t num_tokens = 0;
  for (int64_t r = 0; r < step.num_requests; ++r) num_tokens += step.counts[r];
  if (step.num_requests > max_requests_ || num_tokens > max_tokens_ || step.num_logit_rows > max_requests_) {
    throw std::length_error("a step of " + std::to_string(step.num_requests) + " requests, " +
                            std::to_string(num_tokens) + " tokens and " + std::to_string(step.num_logit_rows) +
                            " rows of logits is larger than the plan");
  }
  step_ = step;
  step_.num_tokens = num_tokens;
  step_.allows_tiles = tile_rows_ > 0;
  parts_ = parts;
  nanoseconds_ = nanoseconds;
  derive();
  pool_->run([](void* plan, int thread, Barrier& barrier) { static_cast<Plan*>(plan)->run_thread(thread, barrier); },
             this);
  if (fetcher_) fetcher_->finish();
}

void Plan::run_thread(int thread, Barrier& barrier) {
  const Context context{&step_,   thread,       pool_->num_threads(), scratch_ + thread * kScratchBytes,
                        &barrier, ahead_bytes_, fetcher_.get()};
  const OpTable& table = *chosen_ops;
  int64_t* times = thread == 0 ? nanoseconds_ : nullptr;
  int64_t before = times != nullptr ? now() : 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if ((entry.mask & parts_) == 0) continue;
    const int64_t num_rows = (entry.mask & kTokenParts) != 0 ? step_.num_tokens : step_.num_logit_rows;
    const bool as_tiles = tile_rows_ > 0 && num_rows >= tile_rows_;
    table.ops[static_cast<size_t>(entry.op)]->run(as_tiles ? entry.tile_params : entry.params, context);
    barrier.wait();
    if (times != nullptr) {
      const int64_t after = now();
      times[i] = after - before;
      before = after;
    }
  }
}

}  // namespace quire
