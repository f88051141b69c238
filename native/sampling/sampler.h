// Rows of a step spread over the engine's threads.
#pragma once
#include <memory>
#include <vector>

#include "ranks/exchange.h"
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

// Rows of a rank's share of the vocabulary. Shapes: logits [S, count] at `stride` elements. `sizes` [S]: how many of
// the largest logits of a row each rank gives; `first_id`: the token of the first logit.
struct ShareRows {
  const float* logits;
  int64_t stride, count, num_rows, first_id;
  const int64_t* sizes;
};

class Sampler {
 public:
  // Without a pool everything runs on the calling thread, as does a single row: handing out a part of 20 µs costs more
  // than it saves.
  Sampler(int64_t vocab_size, std::shared_ptr<ThreadPool> pool);

  // One token per row: options has one per row.
  void sample(const LogitRows& rows, const std::vector<const RowOptions*>& options);

  // Gives rank 0 the keys of the largest logits of all ranks: `keys`, of each row those of one rank after another. All
  // ranks call it at once. False: the ranks have given up.
  bool merge_best(const ShareRows& rows, const Exchange& exchange, uint64_t* keys);

  // One token per row, of merged keys: `num_keys` of each row.
  void sample_best(uint64_t* keys, const int64_t* num_keys, const std::vector<const RowOptions*>& options,
                   int32_t* token_ids);

  // Log-probabilities of given tokens, and the `num_top` likeliest of each row.
  void logprobs(const LogitRows& rows, int64_t num_top);

 private:
  void run(const LogitRows& rows, const RowOptions* const* options, int64_t num_top);
  // work(sampler, index) for each row.
  template <typename Work>
  void for_rows(int64_t count, Work work);
  static void run_row(RowSampler& sampler, const LogitRows& rows, int64_t index, const RowOptions* options,
                      int64_t num_top);

  std::shared_ptr<ThreadPool> pool_;
  ThreadPool alone_{1};
  std::vector<RowSampler> samplers_;
  std::vector<uint64_t> keys_;
};

}  // namespace quire
