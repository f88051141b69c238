// Rows of a step spread over the engine's threads.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "sampling/row.h"
#include "threads/pool.h"

namespace quire {

// Rows of logits and where their results go. Shapes: logits [S, V] at `stride` elements, token_ids [S], logprobs [S],
// ranks [S], top_ids and top_logprobs [S, top_stride]. An address may be null.
struct LogitRows {
  float* logits;
  int64_t stride;
  int64_t count;
  int32_t* token_ids;
  float* logprobs;
  int64_t* ranks;
  int32_t* top_ids;
  float* top_logprobs;
  int64_t top_stride;
};

class Sampler {
 public:
  // Without a pool everything runs on the calling thread, as does a single row: handing out a part of 20 µs costs more
  // than it saves.
  Sampler(int64_t vocab_size, std::shared_ptr<ThreadPool> pool);

  // One token per row: options has one per row.
  void sample(const LogitRows& rows, const std::vector<const RowOptions*>& options);

  // Log-probabilities of given tokens, and the `num_top` likeliest of each row.
  void logprobs(const LogitRows& rows, int64_t num_top);

 private:
  void run(const LogitRows& rows, const RowOptions* const* options, int64_t num_top);
  void run_thread(int thread);
  void run_row(RowSampler& sampler, int64_t index) const;

  std::shared_ptr<ThreadPool> pool_;
  ThreadPool alone_{1};
  std::vector<RowSampler> samplers_;
  // Of the call that runs:
  LogitRows rows_{};
  const RowOptions* const* options_ = nullptr;
  int64_t num_top_ = 0;
  std::atomic<int64_t> next_row_{0};
};

}  // namespace quire
