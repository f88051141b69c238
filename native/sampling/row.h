// From one row of logits to a token and its log-probabilities, as sampling/sampler.py documents. Next to read: row.cpp.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "sampling/table.h"

namespace quire {

// Token ids in memory of the caller, for some uses with a value each; no id occurs twice. Those that are not in the
// vocabulary are passed over.
struct Ids {
  const int64_t* ids = nullptr;
  const float* values = nullptr;
  int64_t count = 0;
};

struct RowOptions {
  float temperature = 1.0f;  // 0: greedy
  float min_p = 0.0f;
  double top_p = 1.0;
  int64_t top_k = 0;  // 0: off
  uint64_t seed = 0;
  uint64_t position = 0;
  float repetition_penalty = 1.0f;
  float frequency_penalty = 0.0f;
  float presence_penalty = 0.0f;
  bool wants_logprobs = false;
  int64_t num_top = 0;  // likeliest tokens to report; at most the vocabulary
  Ids allowed;          // ascending; if there are any, nothing else may be chosen
  Ids banned;
  Ids bias;       // values are added
  Ids penalised;  // values: how often each was generated; 0 for a token of the prompt
};

struct Logprob {
  float value;
  int64_t rank;
};

// Where the likeliest tokens go, best first.
struct TopTokens {
  int32_t* ids;
  float* logprobs;
  int64_t count;
};

// A row, or what edits and allowed tokens made of it.
struct ScannedRow {
  Values values;
  float max;  // NaN where a value is
  int64_t* chunk_weights;
  // Once it is weighed:
  Weighing weighing;
  int64_t weight;
};

// The memory that one thread needs for rows of up to `vocab_size` logits.
class RowSampler {
 public:
  explicit RowSampler(int64_t vocab_size);

  // The token, or -1 where the logits leave no choice. `logprob` and `top` are filled in if `options` wants them and
  // there is a token. While this runs the logits are edited in place.
  int64_t sample(float* logits, const RowOptions& options, Logprob* logprob, const TopTokens& top);

  // Keys of the `size` largest of a rank's `count` logits, of which the first is token `first_id`, in no order: 0 for
  // those that there are not. If a logit is NaN, one key is.
  void best_of_share(const float* logits, int64_t count, int64_t first_id, int64_t size, uint64_t* keys);

  // `sample` from the `count` keys of all ranks, if these have the best tokens that the options leave: the token is
  // that of the whole row. Orders the keys.
  int64_t sample_best(uint64_t* keys, int64_t count, const RowOptions& options);

  // What is known of one token given the logits before it.
  Logprob logprob_of(const float* logits, int64_t token_id, const TopTokens& top);

 private:
  // A token by its place among the collected keys when these are in order.
  struct Place {
    int64_t index;
    int64_t weight;  // of the tokens up to and with it
  };

  ScannedRow scan(const float* x, int64_t count, int place);
  void weigh(ScannedRow& row, const Weighing& weighing);
  ScannedRow gather(const float* logits, const Ids& allowed);
  void edit(float* logits, const RowOptions& options);
  void restore();
  bool in_vocabulary(int64_t id) const { return id >= 0 && id < vocab_size_; }

  int64_t choose(ScannedRow& row, const RowOptions& options);
  int64_t draw_from_best(const ScannedRow& row, const Weighing& weighing, const RowOptions& options);
  int64_t draw_from_nucleus(ScannedRow& row, const Weighing& weighing, const RowOptions& options);
  int64_t draw_by_trial(ScannedRow& row, int64_t limit, const RowOptions& options);
  Place place_of(int64_t target, int64_t count, const Weighing& weighing);
  int64_t weigh_keys(int64_t begin, int64_t end, const Weighing& weighing);
  int64_t collect_best(const ScannedRow& row, int64_t size, float offset, float second_offset);
  Logprob report(const ScannedRow& raw, int64_t token_id, const TopTokens& top);

  const int64_t vocab_size_;
  std::vector<float> maxima_[2];  // of the logits as they came, and as edited
  std::vector<int64_t> chunk_weights_[2];
  struct Undo {
    float* logit;
    float value;
  };
  std::vector<Undo> undo_;
  // As long as the vocabulary, though seldom more than their first pages are touched.
  std::unique_ptr<float[]> gathered_, weights_, key_values_;
  std::unique_ptr<uint64_t[]> keys_;
  std::unique_ptr<int64_t[]> key_weights_;
};

}  // namespace quire
