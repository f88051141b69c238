// The passes over one row of logits that each instruction set has its own version of (sampling/kernels.h).
//
// A row is read in chunks of 256; of each chunk 16 maxima are kept (element i belongs to maximum i % 16), so that later
// passes skip the chunks that cannot matter. A token's weight is exp((x - max) / temperature) as an integer, in units
// of 2^-40: sums are exact, so that what is drawn does not depend on the order of summation, and those of 8 million
// tokens fit 63 bits.
#pragma once
#include <cstdint>

namespace quire {

constexpr int64_t kChunk = 256;
constexpr int64_t kChunkMaxima = 16;
constexpr int64_t kKeysAtOnce = 4;

// The values of a row, and its chunks' maxima: [chunks][kChunkMaxima].
struct Values {
  const float* x;
  int64_t count;
  float* maxima;
};

// How values become weights.
struct Weighing {
  float max;         // of the row, finite
  float scale;       // log2(e) / temperature
  float lowest;      // x - max is raised to this: so low that it weighs nothing
  float cut;         // nothing below this value weighs anything
  float min_weight;  // lighter tokens weigh nothing: min_p
};

// The tokens before this one are those of a larger value, or of the same with a lower id.
struct Pivot {
  float value;
  int64_t id;
};

struct SamplingKernels {
  // Fills in the maxima and returns the largest value; NaN if there is one in the row.
  float (*scan)(const Values& row);
  // The lowest id of a value.
  int64_t (*first_equal)(const Values& row, float value);
  // Weight of each chunk, and of all. `weights`, whole chunks of them, get those of the tokens as floats, but for
  // chunks that weigh nothing.
  int64_t (*weigh)(const Values& row, const Weighing& weighing, float* weights, int64_t* chunk_weights);
  // Reduces the chunks' weights to those of the tokens before the pivot.
  int64_t (*keep_before)(const Values& row, const float* weights, const Pivot& pivot, int64_t* chunk_weights);
  // The weight of each of `count` values.
  void (*weights)(const float* x, int64_t count, const Weighing& weighing, int64_t* weights);
  // The sum of exp((x - max) / temperature), all of which count. A third faster than `weigh`, and nothing to draw from.
  double (*softmax_sum)(const Values& row, const Weighing& weighing);
  // Keys of all values v = x - offset - second_offset that are at least `bound`, in any order; how many there are. Up
  // to kKeysAtOnce - 1 more are written.
  int64_t (*collect)(const Values& row, float offset, float second_offset, float bound, uint64_t* keys);
  // How many of these v are larger than `value`.
  int64_t (*count_above)(const Values& row, float offset, float second_offset, float value);
  // How many of `count` values, a multiple of 16, are at least `bound`.
  int64_t (*count_at_least)(const float* x, int64_t count, float bound);
};

// Not shared: some files that include this are compiled for one instruction set (isa/simd.h).
namespace {

inline int64_t num_chunks(int64_t count) { return (count + kChunk - 1) / kChunk; }

// A value and its id as one number, larger for a larger value, and of equal values for a lower id.
inline uint64_t make_key(float value, int64_t id) {
  const float one_zero = value + 0.0f;  // -0 and 0 are equal
  uint32_t bits;
  __builtin_memcpy(&bits, &one_zero, sizeof bits);
  bits = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return (static_cast<uint64_t>(bits) << 32) | (0xffffffffu - static_cast<uint32_t>(id));
}
inline int64_t id_of(uint64_t key) { return static_cast<int64_t>(0xffffffffu - static_cast<uint32_t>(key)); }
inline float value_of(uint64_t key) {
  uint32_t bits = static_cast<uint32_t>(key >> 32);
  bits = (bits & 0x80000000u) != 0 ? bits & 0x7fffffffu : ~bits;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace
}  // namespace quire
