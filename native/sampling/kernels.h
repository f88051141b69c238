// The passes of sampling/table.h, once for all instruction sets.
#pragma once
#include "ops/functions.h"
#include "sampling/lanes.h"
#include "sampling/table.h"

namespace quire {
namespace {
namespace sampling {

// A chunk of a row: its address, or that of a copy filled up with -inf where the row ends within it.
inline const float* chunk_at(const Values& row, int64_t chunk, float* copy) {
  const float* x = row.x + chunk * kChunk;
  const int64_t left = row.count - chunk * kChunk;
  if (left >= kChunk) return x;
  for (int64_t i = 0; i < kChunk; ++i) copy[i] = i < left ? x[i] : -__builtin_inff();
  return copy;
}

inline float scan(const Values& row) {
  float copy[kChunk];
  uint32_t nan = 0;
  F32x16 best = broadcast(-__builtin_inff());
  for (int64_t chunk = 0; chunk < num_chunks(row.count); ++chunk) {
    const float* x = chunk_at(row, chunk, copy);
    F32x16 even = load(x), odd = load(x + kLanes);
    nan |= either_nan(even, odd);
    for (int64_t i = 2 * kLanes; i < kChunk; i += 2 * kLanes) {
      const F32x16 a = load(x + i), b = load(x + i + kLanes);
      nan |= either_nan(a, b);
      even = max(even, a);
      odd = max(odd, b);
    }
    even = max(even, odd);
    store(row.maxima + chunk * kChunkMaxima, even);
    best = max(best, even);
  }
  return nan != 0 ? __builtin_nanf("") : largest(best);
}

inline int64_t first_equal(const Values& row, float value) {
  float copy[kChunk];
  const F32x16 wanted = broadcast(value);
  for (int64_t chunk = 0; chunk < num_chunks(row.count); ++chunk) {
    if (equal(load(row.maxima + chunk * kChunkMaxima), wanted) == 0) continue;
    const float* x = chunk_at(row, chunk, copy);
    for (int64_t i = 0; i < kChunk; i += kLanes) {
      const uint32_t found = equal(load(x + i), wanted);
      if (found != 0) return chunk * kChunk + i + __builtin_ctz(found);
    }
  }
  return -1;
}

// exp((x - max) / temperature), at most 1.
template <bool kHasMin>
inline F32x16 weight_of(F32x16 x, const Weighing& weighing) {
  const F32x16 below = max(x - broadcast(weighing.max), broadcast(weighing.lowest));
  const F32x16 weight = exp2_scaled(below, broadcast(weighing.scale));
  return kHasMin ? select_less(weight, broadcast(weighing.min_weight), zero(), weight) : weight;
}

// Weights w <= 1 in units of 2^-40, as a multiple of 2^-22 and a rest. Adding a large number rounds and leaves the
// integer in the low bits, where up to 256 of them can be summed; converting to 64 bits takes half as long again.
constexpr float kCoarse = 3.0f, kFine = 0x1.8p-17f;
constexpr uint32_t kCoarseBits = 0x40400000u, kFineBits = 0x37400000u;
constexpr int kFineDigits = 18;

struct WeightSum {
  I32x16 coarse, fine;
};
inline void add(WeightSum& total, F32x16 weight) {
  const F32x16 rounded = weight + broadcast(kCoarse);
  const F32x16 rest = weight - (rounded - broadcast(kCoarse));
  total.coarse = total.coarse + bits_of(rounded);
  total.fine = total.fine + bits_of(rest + broadcast(kFine));
}
inline int64_t joined(uint32_t coarse, uint32_t fine, uint32_t count) {
  return (static_cast<int64_t>(coarse - count * kCoarseBits) << kFineDigits) +
         static_cast<int32_t>(fine - count * kFineBits);
}
inline int64_t chunk_weight(const WeightSum& total) { return joined(sum(total.coarse), sum(total.fine), kChunk); }

template <bool kHasMin>
inline int64_t weigh_as(const Values& row, const Weighing& weighing, float* weights, int64_t* chunk_weights) {
  float copy[kChunk];
  const F32x16 cut = broadcast(weighing.cut);
  int64_t total = 0;
  for (int64_t chunk = 0; chunk < num_chunks(row.count); ++chunk) {
    chunk_weights[chunk] = 0;
    if (at_least(load(row.maxima + chunk * kChunkMaxima), cut) == 0) continue;
    const float* x = chunk_at(row, chunk, copy);
    float* out = weights + chunk * kChunk;
    WeightSum found{zero_i(), zero_i()};
    for (int64_t i = 0; i < kChunk; i += 2 * kLanes) {
      const F32x16 a = weight_of<kHasMin>(load(x + i), weighing);
      const F32x16 b = weight_of<kHasMin>(load(x + i + kLanes), weighing);
      add(found, a);
      add(found, b);
      store(out + i, a);
      store(out + i + kLanes, b);
    }
    chunk_weights[chunk] = chunk_weight(found);
    total += chunk_weights[chunk];
  }
  return total;
}

inline int64_t weigh(const Values& row, const Weighing& weighing, float* weights, int64_t* chunk_weights) {
  return weighing.min_weight > 0.0f ? weigh_as<true>(row, weighing, weights, chunk_weights)
                                    : weigh_as<false>(row, weighing, weights, chunk_weights);
}

// Lanes are summed chunk by chunk, chunks one after the other.
inline double softmax_sum(const Values& row, const Weighing& weighing) {
  float copy[kChunk];
  double total = 0.0;
  for (int64_t chunk = 0; chunk < num_chunks(row.count); ++chunk) {
    const float* x = chunk_at(row, chunk, copy);
    F32x16 even = zero(), odd = zero();
    for (int64_t i = 0; i < kChunk; i += 2 * kLanes) {
      even = even + weight_of<false>(load(x + i), weighing);
      odd = odd + weight_of<false>(load(x + i + kLanes), weighing);
    }
    total += static_cast<double>(sum(even + odd));
  }
  return total;
}

inline int64_t keep_before(const Values& row, const float* weights, const Pivot& pivot, int64_t* chunk_weights) {
  float copy[kChunk];
  const F32x16 cut = broadcast(pivot.value);
  int64_t total = 0;
  for (int64_t chunk = 0; chunk < num_chunks(row.count); ++chunk) {
    if (chunk_weights[chunk] == 0) continue;
    chunk_weights[chunk] = 0;
    if (at_least(load(row.maxima + chunk * kChunkMaxima), cut) == 0) continue;
    const float* x = chunk_at(row, chunk, copy);
    const int64_t num_before = pivot.id - chunk * kChunk;  // elements of a lower id than the pivot's
    WeightSum kept{zero_i(), zero_i()};
    for (int64_t i = 0; i < kChunk; i += kLanes) {
      const F32x16 value = load(x + i);
      F32x16 weight = load(weights + chunk * kChunk + i);
      if (i + kLanes <= num_before) {
        weight = select_less(value, cut, zero(), weight);
      } else if (i >= num_before) {
        weight = select_less(cut, value, weight, zero());
      } else {
        float some[kLanes];
        store(some, weight);
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          const float own = x[i + lane];
          if (own < pivot.value || (own == pivot.value && i + lane >= num_before)) some[lane] = 0.0f;
        }
        weight = load(some);
      }
      add(kept, weight);
    }
    chunk_weights[chunk] = chunk_weight(kept);
    total += chunk_weights[chunk];
  }
  return total;
}

inline void weights(const float* x, int64_t count, const Weighing& weighing, int64_t* out) {
  float values[kLanes];
  int32_t coarse[kLanes], fine[kLanes];
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = count - i < kLanes ? count - i : kLanes;
    for (int64_t lane = 0; lane < kLanes; ++lane) values[lane] = lane < left ? x[i + lane] : weighing.max;
    WeightSum some{zero_i(), zero_i()};
    add(some, weight_of<true>(load(values), weighing));
    store(coarse, some.coarse);
    store(fine, some.fine);
    for (int64_t lane = 0; lane < left; ++lane) {
      out[i + lane] = joined(static_cast<uint32_t>(coarse[lane]), static_cast<uint32_t>(fine[lane]), 1);
    }
  }
}

// Found elements are gone through 64 at a time, the first four of them without a branch: where some are found here and
// there, mispredicted branches would take most of the time.
inline int64_t collect(const Values& row, float offset, float second_offset, float bound, uint64_t* keys) {
  float copy[kChunk];
  const F32x16 a = broadcast(offset), b = broadcast(second_offset), least = broadcast(bound);
  int64_t num_found = 0;
  for (int64_t chunk = 0; chunk < num_chunks(row.count); ++chunk) {
    // Subtraction never reverses an order: where no maximum reaches the bound, no value does.
    if (at_least(load(row.maxima + chunk * kChunkMaxima) - a - b, least) == 0) continue;
    const float* x = chunk_at(row, chunk, copy);
    for (int64_t start = 0; start < kChunk; start += 64) {
      uint64_t found = 0;
      for (int64_t i = 0; i < 64; i += kLanes) {
        found |= static_cast<uint64_t>(at_least(load(x + start + i) - a - b, least)) << i;
      }
      const int64_t left = row.count - chunk * kChunk - start;
      if (left < 64) found &= left > 0 ? (uint64_t{1} << left) - 1 : 0;
      if (found == 0) continue;
      uint64_t* next = keys + num_found;
      num_found += __builtin_popcountll(found);
      do {
        for (int i = 0; i < kKeysAtOnce; ++i, found &= found - 1) {
          const int64_t place = start + __builtin_ctzll(found | uint64_t{1} << 63);
          *next++ = make_key(x[place] - offset - second_offset, chunk * kChunk + place);
        }
      } while (found != 0);
    }
  }
  return num_found;
}

inline int64_t count_above(const Values& row, float offset, float second_offset, float value) {
  float copy[kChunk];
  const F32x16 a = broadcast(offset), b = broadcast(second_offset), own = broadcast(value);
  int64_t found = 0;
  for (int64_t chunk = 0; chunk < num_chunks(row.count); ++chunk) {
    if (greater(load(row.maxima + chunk * kChunkMaxima) - a - b, own) == 0) continue;
    const float* x = chunk_at(row, chunk, copy);
    for (int64_t i = 0; i < kChunk; i += kLanes) found += __builtin_popcount(greater(load(x + i) - a - b, own));
  }
  return found;
}

inline int64_t count_at_least(const float* x, int64_t count, float bound) {
  const F32x16 least = broadcast(bound);
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += kLanes) found += __builtin_popcount(at_least(load(x + i), least));
  return found;
}

constexpr SamplingKernels kKernels = {scan,        first_equal, weigh,       keep_before,   weights,
                                      softmax_sum, collect,     count_above, count_at_least};

}  // namespace sampling
}  // namespace
}  // namespace quire
