#include "sampling/row.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>

#include "isa/choose.h"
#include "sampling/random.h"

namespace quire {

namespace {

constexpr double kLog2E = 1.4426950408889634;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kReached = 1.0 - 1e-6;          // weights come from fp32: a sum this close to top_p has reached it
constexpr int64_t kMaxVocab = int64_t{1} << 22;  // whose weights cannot overflow
constexpr int64_t kNucleusPool = 128;            // likeliest tokens looked at for top_p before a row counts as flat
constexpr int64_t kSorted = 64;                  // so few keys are sorted rather than parted further
constexpr int kMaxRounds = 50;                   // where parting goes this badly, sorting is faster

const SamplingKernels& kernels() { return chosen_ops->sampling; }

bool is_finite(float value) { return value - value == 0.0f; }

Weighing weighing_for(float max, float temperature, float min_p) {
  const double scale = kLog2E / temperature;
  // 2^-41 of the best token's weight is rounded to 0. The margins are wider than the errors of a weight.
  const double depth = min_p > 0.0f ? std::min(42.0, 0.01 - std::log2(static_cast<double>(min_p))) : 42.0;
  return {max, static_cast<float>(scale), static_cast<float>(-80.0 / scale), static_cast<float>(max - depth / scale),
          min_p};
}

// The place in 0 … weight - 1 at which a number in [0, 1) points.
int64_t target_of(double number, int64_t weight) {
  return std::min(static_cast<int64_t>(number * static_cast<double>(weight)), weight - 1);
}

// The weight that reaches top_p of `weight`; at least 1, so that the best token always counts.
int64_t limit_of(double top_p, int64_t weight) {
  return std::max(int64_t{1}, static_cast<int64_t>(static_cast<double>(weight) * (top_p * kReached)));
}

// Moves the larger of keys begin … end - 1, at least three, to the front; returns where the others begin. Neither part
// is empty. Without branches on keys, of which every second one would be mispredicted.
int64_t part(uint64_t* keys, int64_t begin, int64_t end) {
  const uint64_t a = keys[begin], b = keys[begin + (end - begin) / 2], c = keys[end - 1];
  const uint64_t pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
  int64_t middle = begin;
  for (int64_t i = begin; i < end; ++i) {
    const uint64_t key = keys[i];
    keys[i] = keys[middle];
    keys[middle] = key;
    middle += key > pivot ? 1 : 0;
  }
  return middle;
}

bool ranks_before(float value, int64_t id, const Pivot& pivot) {
  return value > pivot.value || (value == pivot.value && id < pivot.id);
}

// Draws by weight in the order of ids; with a pivot, from the tokens before it, whose chunks' weights the row's are.
int64_t draw(const ScannedRow& row, const Pivot* pivot, double number) {
  int64_t target = target_of(number, row.weight), chunk = 0;
  for (; target >= row.chunk_weights[chunk]; ++chunk) target -= row.chunk_weights[chunk];
  int64_t weights[kChunk];
  const int64_t first = chunk * kChunk, count = std::min(kChunk, row.values.count - first);
  kernels().weights(row.values.x + first, count, row.weighing, weights);
  for (int64_t i = 0; i < count; ++i) {
    if (pivot != nullptr && !ranks_before(row.values.x[first + i], first + i, *pivot)) continue;
    if (target < weights[i]) return first + i;
    target -= weights[i];
  }
  return -1;  // never: the chunk's weight is the sum of these
}

// A value that at least `size` values of the row reach, and not many more: it is sought among the chunks' maxima, of
// which each stands for at least one value.
float bound_for(const ScannedRow& row, int64_t size) {
  const float* maxima = row.values.maxima;
  const int64_t count = num_chunks(row.values.count) * kChunkMaxima, enough = size + size / 4 + 16;
  if (size > count) return -FLT_MAX;
  float low = row.max, high = row.max;
  int64_t found = kernels().count_at_least(maxima, count, low);
  for (float depth = 1.0f; found < size; depth *= 2.0f) {
    high = low;
    low = row.max - depth;
    if (!(low > -FLT_MAX)) return -FLT_MAX;
    found = kernels().count_at_least(maxima, count, low);
  }
  for (int i = 0; i < 24 && found > enough; ++i) {
    const float middle = low + (high - low) * 0.5f;
    const int64_t above = kernels().count_at_least(maxima, count, middle);
    if (above >= size) {
      low = middle;
      found = above;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace

RowSampler::RowSampler(int64_t vocab_size) : vocab_size_(vocab_size) {
  if (vocab_size < 1 || vocab_size > kMaxVocab) throw std::length_error("a vocabulary has 1 to 4 million tokens");
  const auto size = static_cast<size_t>(vocab_size), chunks = static_cast<size_t>(num_chunks(vocab_size));
  for (int place : {0, 1}) {
    maxima_[place].resize(chunks * kChunkMaxima);
    chunk_weights_[place].resize(chunks);
  }
  gathered_ = std::make_unique_for_overwrite<float[]>(size);
  weights_ = std::make_unique_for_overwrite<float[]>(chunks * kChunk);
  keys_ = std::make_unique_for_overwrite<uint64_t[]>(size + kKeysAtOnce);
  key_values_ = std::make_unique_for_overwrite<float[]>(size);
  key_weights_ = std::make_unique_for_overwrite<int64_t[]>(size);
}

int64_t RowSampler::sample(float* logits, const RowOptions& options, Logprob* logprob, const TopTokens& top) {
  const bool gathers = options.allowed.count > 0;
  ScannedRow raw{};
  if (options.wants_logprobs) raw = scan(logits, vocab_size_, 0);
  edit(logits, options);
  const bool is_raw = options.wants_logprobs && undo_.empty() && !gathers;
  ScannedRow row = is_raw ? raw : gathers ? gather(logits, options.allowed) : scan(logits, vocab_size_, 1);
  const int64_t index = choose(row, options);
  restore();
  const int64_t token_id = gathers && index >= 0 ? options.allowed.ids[index] : index;
  if (options.wants_logprobs && token_id >= 0) *logprob = report(raw, token_id, top);
  return token_id;
}

void RowSampler::best_of_share(const float* logits, int64_t count, int64_t first_id, int64_t size, uint64_t* keys) {
  std::fill_n(keys, size, uint64_t{0});
  if (count == 0) return;
  const ScannedRow row = scan(logits, count, 0);
  if (row.max == -kInfinity) return;
  if (row.max != row.max) {
    keys[0] = make_key(row.max, first_id);
    return;
  }
  const int64_t found = collect_best(row, std::min(size, count), 0.0f, 0.0f);
  for (int64_t i = 0; i < found; ++i) keys[i] = make_key(value_of(keys_[i]), first_id + id_of(keys_[i]));
}

int64_t RowSampler::sample_best(uint64_t* keys, int64_t count, const RowOptions& options) {
  count = std::remove(keys, keys + count, uint64_t{0}) - keys;
  if (count == 0) return -1;
  // In the order of the whole row, in which equal values rank.
  std::sort(keys, keys + count, [](uint64_t a, uint64_t b) { return id_of(a) < id_of(b); });
  for (int64_t i = 0; i < count; ++i) gathered_[i] = value_of(keys[i]);
  ScannedRow row = scan(gathered_.get(), count, 1);
  const int64_t index = choose(row, options);
  return index < 0 ? -1 : id_of(keys[index]);
}

Logprob RowSampler::logprob_of(const float* logits, int64_t token_id, const TopTokens& top) {
  return report(scan(logits, vocab_size_, 0), token_id, top);
}

// --- Rows ---------------------------------------------------------------------------------------------------------

ScannedRow RowSampler::scan(const float* x, int64_t count, int place) {
  ScannedRow row{{x, count, maxima_[place].data()}, 0.0f, chunk_weights_[place].data(), {}, 0};
  row.max = kernels().scan(row.values);
  return row;
}

void RowSampler::weigh(ScannedRow& row, const Weighing& weighing) {
  row.weighing = weighing;
  row.weight = kernels().weigh(row.values, weighing, weights_.get(), row.chunk_weights);
}

// A short row of the allowed tokens only; its ids are places in their list.
ScannedRow RowSampler::gather(const float* logits, const Ids& allowed) {
  for (int64_t i = 0; i < allowed.count; ++i) {
    gathered_[i] = in_vocabulary(allowed.ids[i]) ? logits[allowed.ids[i]] : -kInfinity;
  }
  return scan(gathered_.get(), allowed.count, 1);
}

void RowSampler::edit(float* logits, const RowOptions& options) {
  undo_.clear();
  const auto each = [&](const Ids& list, auto edited) {
    for (int64_t i = 0; i < list.count; ++i) {
      if (!in_vocabulary(list.ids[i])) continue;
      float& logit = logits[list.ids[i]];
      undo_.push_back({&logit, logit});
      logit = edited(logit, i);
    }
  };
  each(options.banned, [](float, int64_t) { return -kInfinity; });
  each(options.bias, [&](float logit, int64_t i) { return logit + options.bias.values[i]; });
  each(options.penalised, [&](float logit, int64_t i) {
    const float times = options.penalised.values[i], repetition = options.repetition_penalty;
    const float repeated = logit > 0.0f ? logit / repetition : logit * repetition;
    return repeated - (options.frequency_penalty * times + (times > 0.0f ? options.presence_penalty : 0.0f));
  });
}

void RowSampler::restore() {
  for (; !undo_.empty(); undo_.pop_back()) *undo_.back().logit = undo_.back().value;
}

// --- Choosing -----------------------------------------------------------------------------------------------------

int64_t RowSampler::choose(ScannedRow& row, const RowOptions& options) {
  if (!is_finite(row.max)) return -1;
  if (options.temperature == 0.0f) return kernels().first_equal(row.values, row.max);
  const Weighing weighing = weighing_for(row.max, options.temperature, options.min_p);
  if (options.top_k > 0 && options.top_k < vocab_size_) return draw_from_best(row, weighing, options);
  if (options.top_p < 1.0) return draw_from_nucleus(row, weighing, options);
  weigh(row, weighing);
  return draw(row, nullptr, uniform(options.seed, options.position, 0));
}

// top_k, then top_p within: only these tokens need weights.
int64_t RowSampler::draw_from_best(const ScannedRow& row, const Weighing& weighing, const RowOptions& options) {
  const int64_t count = collect_best(row, std::min(options.top_k, row.values.count), 0.0f, 0.0f);
  Place last{count - 1, weigh_keys(0, count, weighing)};
  if (options.top_p < 1.0) last = place_of(limit_of(options.top_p, last.weight) - 1, count, weighing);
  const int64_t target = target_of(uniform(options.seed, options.position, 0), last.weight);
  return id_of(keys_[place_of(target, last.index + 1, weighing).index]);
}

// top_p alone: mostly a few likeliest tokens reach it, and one of these is drawn.
int64_t RowSampler::draw_from_nucleus(ScannedRow& row, const Weighing& weighing, const RowOptions& options) {
  weigh(row, weighing);
  const int64_t limit = limit_of(options.top_p, row.weight);
  const int64_t count = collect_best(row, std::min(kNucleusPool, row.values.count), 0.0f, 0.0f);
  if (weigh_keys(0, count, weighing) < limit) return draw_by_trial(row, limit, options);
  const float end = value_of(*std::min_element(keys_.get(), keys_.get() + count));
  const Place last = place_of(limit - 1, count, weighing);
  // A last kept value that also ends the pool may go on outside of it.
  const bool is_whole = count < kNucleusPool || vocab_size_ <= kNucleusPool;
  if (!is_whole && value_of(keys_[last.index]) == end) return draw_by_trial(row, limit, options);
  const int64_t target = target_of(uniform(options.seed, options.position, 0), last.weight);
  return id_of(keys_[place_of(target, last.index + 1, weighing).index]);
}

// top_p for flat rows, as nucleus.py tells: draw from all tokens, and take what those before it leave inside.
int64_t RowSampler::draw_by_trial(ScannedRow& row, int64_t limit, const RowOptions& options) {
  Pivot pivot{};
  for (uint32_t attempt = 0;; ++attempt) {
    const double number = uniform(options.seed, options.position, attempt);
    const int64_t id = draw(row, attempt > 0 ? &pivot : nullptr, number);
    pivot = {row.values.x[id], id};
    row.weight = kernels().keep_before(row.values, weights_.get(), pivot, row.chunk_weights);
    if (row.weight < limit) return id;
  }
}

// The first of the `count` collected tokens, in order, up to which they weigh more than `target`. Keys before it are
// the better ones then; they are sorted only where it lies.
RowSampler::Place RowSampler::place_of(int64_t target, int64_t count, const Weighing& weighing) {
  uint64_t* keys = keys_.get();
  int64_t begin = 0, end = count, before = 0;
  for (int round = 0; end - begin > kSorted && round < kMaxRounds; ++round) {
    const int64_t middle = part(keys, begin, end), weight = weigh_keys(begin, middle, weighing);
    if (target < before + weight) {
      end = middle;
    } else {
      before += weight;
      begin = middle;
    }
  }
  std::sort(keys + begin, keys + end, std::greater<>());
  weigh_keys(begin, end, weighing);
  for (; begin < end; ++begin) {
    before += key_weights_[begin];
    if (target < before) break;
  }
  return {begin, before};
}

int64_t RowSampler::weigh_keys(int64_t begin, int64_t end, const Weighing& weighing) {
  for (int64_t i = begin; i < end; ++i) key_values_[i] = value_of(keys_[i]);
  kernels().weights(key_values_.get() + begin, end - begin, weighing, key_weights_.get() + begin);
  int64_t weight = 0;
  for (int64_t i = begin; i < end; ++i) weight += key_weights_[i];
  return weight;
}

// Keys of the `size` largest x - offset - second_offset, in no order; of fewer where others are -inf.
int64_t RowSampler::collect_best(const ScannedRow& row, int64_t size, float offset, float second_offset) {
  const float bound = bound_for(row, size) - offset - second_offset;
  uint64_t* keys = keys_.get();
  const int64_t found = kernels().collect(row.values, offset, second_offset, bound, keys);
  if (found <= size) return found;
  for (int64_t begin = 0, end = found, round = 0; begin < size && size < end; ++round) {
    if (end - begin <= kSorted || round == kMaxRounds) {
      std::sort(keys + begin, keys + end, std::greater<>());
      break;
    }
    const int64_t middle = part(keys, begin, end);
    (middle <= size ? begin : end) = middle;
  }
  return size;
}

// --- Log-probabilities --------------------------------------------------------------------------------------------

Logprob RowSampler::report(const ScannedRow& raw, int64_t token_id, const TopTokens& top) {
  if (!is_finite(raw.max)) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (int64_t i = 0; i < top.count; ++i) {
      top.ids[i] = static_cast<int32_t>(i);
      top.logprobs[i] = nan;
    }
    return {nan, 1};
  }
  const double sum = kernels().softmax_sum(raw.values, weighing_for(raw.max, 1.0f, 0.0f));
  const auto log_sum = static_cast<float>(std::log(sum));
  if (top.count > 0) {
    const int64_t count = collect_best(raw, top.count, raw.max, log_sum);
    std::sort(keys_.get(), keys_.get() + count, std::greater<>());
    for (int64_t i = 0; i < count; ++i) {
      top.ids[i] = static_cast<int32_t>(id_of(keys_[i]));
      top.logprobs[i] = value_of(keys_[i]);
    }
    // What is left is -inf.
    int64_t place = count;
    for (int64_t id = 0; place < top.count; ++id) {
      if (raw.values.x[id] - raw.max - log_sum > -kInfinity) continue;
      top.ids[place] = static_cast<int32_t>(id);
      top.logprobs[place++] = -kInfinity;
    }
  }
  const float own = raw.values.x[token_id] - raw.max - log_sum;
  return {own, 1 + kernels().count_above(raw.values, raw.max, log_sum, own)};
}

}  // namespace quire
