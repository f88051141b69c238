#include "sampling/sampler.h"

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

void Sampler::run(const LogitRows& rows, const RowOptions* const* options, int64_t num_top) {
  rows_ = rows;
  options_ = options;
  num_top_ = num_top;
  next_row_ = 0;
  ThreadPool& pool = pool_ && rows.count > 1 ? *pool_ : alone_;
  pool.run([](void* self, int thread, Barrier&) { static_cast<Sampler*>(self)->run_thread(thread); }, this);
}

// Rows differ in what they want: each thread takes the next one. A row's result does not depend on the thread.
void Sampler::run_thread(int thread) {
  RowSampler& sampler = samplers_[static_cast<size_t>(thread)];
  for (int64_t index = next_row_++; index < rows_.count; index = next_row_++) run_row(sampler, index);
}

void Sampler::run_row(RowSampler& sampler, int64_t index) const {
  float* logits = rows_.logits + index * rows_.stride;
  const RowOptions* options = options_ != nullptr ? options_[index] : nullptr;
  const TopTokens top{rows_.top_ids + index * rows_.top_stride, rows_.top_logprobs + index * rows_.top_stride,
                      options != nullptr ? options->num_top : num_top_};
  Logprob logprob{};
  if (options != nullptr) {
    rows_.token_ids[index] = static_cast<int32_t>(sampler.sample(logits, *options, &logprob, top));
    if (!options->wants_logprobs) return;
  } else {
    logprob = sampler.logprob_of(logits, rows_.token_ids[index], top);
  }
  rows_.logprobs[index] = logprob.value;
  rows_.ranks[index] = logprob.rank;
}

}  // namespace quire
