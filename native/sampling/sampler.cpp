#include "sampling/sampler.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

namespace quire {

Sampler::Sampler(int64_t vocab_size, std::shared_ptr<ThreadPool> pool) : pool_(std::move(pool)) {
  const int num_threads = pool_ ? pool_->num_threads() : 1;
  samplers_.reserve(static_cast<size_t>(num_threads));
  for (int thread = 0; thread < num_threads; ++thread) samplers_.emplace_back(vocab_size);
}

void Sampler::sample(const LogitRows& rows, const std::vector<const RowOptions*>& options) {
  run(rows, options.data(), 0);
}

void Sampler::logprobs(const LogitRows& rows, int64_t num_top) { run(rows, nullptr, num_top); }

bool Sampler::merge_best(const ShareRows& rows, const Exchange& exchange, uint64_t* keys) {
  constexpr int64_t kMost = kSlotBytes / static_cast<int64_t>(sizeof(uint64_t));
  std::vector<int64_t> starts(static_cast<size_t>(rows.num_rows) + 1);
  std::partial_sum(rows.sizes, rows.sizes + rows.num_rows, starts.begin() + 1);
  keys_.resize(static_cast<size_t>(starts.back()));
  for_rows(rows.num_rows, [&](RowSampler& sampler, int64_t index) {
    sampler.best_of_share(rows.logits + index * rows.stride, rows.count, rows.first_id, rows.sizes[index],
                          keys_.data() + starts[static_cast<size_t>(index)]);
  });
  for (int64_t begin = 0, end = 0; begin < rows.num_rows; begin = end) {
    const int64_t first = starts[static_cast<size_t>(begin)];
    while (end < rows.num_rows && starts[static_cast<size_t>(end) + 1] - first <= kMost) ++end;
    const auto bytes = static_cast<size_t>(starts[static_cast<size_t>(end)] - first) * sizeof(uint64_t);
    const uint32_t piece = next_piece(exchange, 0);
    std::memcpy(slot_of(exchange, exchange.rank, 0, piece), keys_.data() + first, bytes);
    if (!meet(exchange, 0, piece, static_cast<int64_t>(bytes))) return false;
    for (int64_t row = begin; exchange.rank == 0 && row < end; ++row) {
      for (int64_t rank = 0; rank < exchange.num_ranks; ++rank) {
        const int64_t at = starts[static_cast<size_t>(row)], size = rows.sizes[row];
        const auto* slot = reinterpret_cast<const uint64_t*>(slot_of(exchange, rank, 0, piece));
        std::copy_n(slot + (at - first), size, keys + at * exchange.num_ranks + rank * size);
      }
    }
  }
  return true;
}

void Sampler::sample_best(uint64_t* keys, const int64_t* num_keys, const std::vector<const RowOptions*>& options,
                          int32_t* token_ids) {
  const auto count = static_cast<int64_t>(options.size());
  std::vector<int64_t> starts(options.size() + 1);
  std::partial_sum(num_keys, num_keys + count, starts.begin() + 1);
  for_rows(count, [&](RowSampler& sampler, int64_t index) {
    const auto row = static_cast<size_t>(index);
    token_ids[index] = static_cast<int32_t>(sampler.sample_best(keys + starts[row], num_keys[index], *options[row]));
  });
}

void Sampler::run(const LogitRows& rows, const RowOptions* const* options, int64_t num_top) {
  for_rows(rows.count, [&](RowSampler& sampler, int64_t index) {
    run_row(sampler, rows, index, options != nullptr ? options[index] : nullptr, num_top);
  });
}

// Rows differ in what they want: each thread takes the next one. A row's result does not depend on the thread.
template <typename Work>
void Sampler::for_rows(int64_t count, Work work) {
  struct Call {
    Sampler* self;
    Work* work;
    int64_t count;
    std::atomic<int64_t> next;
  } call{this, &work, count, {0}};
  ThreadPool& pool = pool_ && count > 1 ? *pool_ : alone_;
  pool.run(
      [](void* given, int thread, Barrier&) {
        auto& of = *static_cast<Call*>(given);
        RowSampler& sampler = of.self->samplers_[static_cast<size_t>(thread)];
        for (int64_t index = of.next++; index < of.count; index = of.next++) (*of.work)(sampler, index);
      },
      &call);
}

void Sampler::run_row(RowSampler& sampler, const LogitRows& rows, int64_t index, const RowOptions* options,
                      int64_t num_top) {
  float* logits = rows.logits + index * rows.stride;
  const TopTokens top{rows.top_ids + index * rows.top_stride, rows.top_logprobs + index * rows.top_stride,
                      options != nullptr ? options->num_top : num_top};
  Logprob logprob{};
  if (options != nullptr) {
    rows.token_ids[index] = static_cast<int32_t>(sampler.sample(logits, *options, &logprob, top));
    if (!options->wants_logprobs) return;
  } else {
    logprob = sampler.logprob_of(logits, rows.token_ids[index], top);
  }
  rows.logprobs[index] = logprob.value;
  rows.ranks[index] = logprob.rank;
}

}  // namespace quire
