// What the kernel of gemm_float.h must know of a weight format: how to take one step along the inputs, and where to
// read the rows' activations. A step is an input, or for bf16 a pair of inputs.
#pragma once
#include "isa/simd_bf16.h"
#include "plan/types.h"

namespace quire {
namespace {

// Activations read in place.
template <int64_t kStepBytes>
struct InPlace {
  static const std::byte* read(const std::byte* row, int64_t begin, int64_t, float*) {
    return row + begin * kStepBytes;
  }
};

#if !defined(QUIRE_BF16_PAIRS)
// bf16 activations widened to fp32 in the order in which they are used: odd before even.
struct WidenedPairs {
  static const std::byte* read(const std::byte* row, int64_t begin, int64_t steps, float* wide) {
    row += begin * 4;
    int64_t i = 0;
    for (; i + kLanes <= steps; i += kLanes) widen_odd_even(row + i * 4, wide + i * 2);
    if (i < steps) {
      alignas(64) std::byte padded[kLanes * 4] = {};
      memcpy(padded, row + i * 4, static_cast<size_t>(steps - i) * 4);
      widen_odd_even(padded, wide + i * 2);
    }
    return reinterpret_cast<const std::byte*>(wide);
  }
};
#endif

// kInputs in a step; bytes of a tile and of a row for a step; kDepth steps are done at once (gemm_float.h). kWide
// vectors of fp32 are a step's weights when widened, which is worth it with many rows; 0: never.
struct F32Weights {
  static constexpr int64_t kInputs = 1, kWeightBytes = 64, kRowBytes = 4, kDepth = 256, kWide = 0;
  using Activations = InPlace<kRowBytes>;
  static F32x16 weights(const std::byte* p) { return load(reinterpret_cast<const float*>(p)); }
  static F32x16 activation(const std::byte* p) { return broadcast(*reinterpret_cast<const float*>(p)); }
  static F32x16 add(F32x16 w, F32x16 x, F32x16 y) { return fma(x, w, y); }
};

struct F16Weights {
  static constexpr int64_t kInputs = 1, kWeightBytes = 32, kRowBytes = 4, kDepth = 256;
#if defined(__AVX512F__)
  static constexpr int64_t kWide = 1;  // widening 16 of them costs about three sums
#else
  static constexpr int64_t kWide = 0;
#endif
  using Activations = InPlace<kRowBytes>;
  static F32x16 weights(const std::byte* p) { return widen_f16(reinterpret_cast<const uint16_t*>(p)); }
  static F32x16 activation(const std::byte* p) { return F32Weights::activation(p); }
  static F32x16 add(F32x16 w, F32x16 x, F32x16 y) { return fma(x, w, y); }
  static void widen(const std::byte* p, float* wide) { store(wide, weights(p)); }
};

struct Bf16Weights {
  static constexpr int64_t kInputs = 2, kWeightBytes = 64;
#if defined(QUIRE_BF16_PAIRS)
  static constexpr int64_t kRowBytes = 4, kDepth = 256, kWide = 0;
  using Activations = InPlace<kRowBytes>;
#elif defined(__AVX512F__)
  static constexpr int64_t kRowBytes = 8, kDepth = 128, kWide = 0;  // enough registers to widen in the kernel
  using Activations = WidenedPairs;
#else
  static constexpr int64_t kRowBytes = 8, kDepth = 128, kWide = 2;
  using Activations = WidenedPairs;
  static void widen(const std::byte* p, float* wide) {
    const Pairs pairs = load_pairs(p);
    store(wide, pairs.odd);
    store(wide + kLanes, pairs.even);
  }
#endif
  static Pairs weights(const std::byte* p) { return load_pairs(p); }
  static BroadcastPair activation(const std::byte* p) { return broadcast_pair(p); }
  static F32x16 add(const Pairs& w, const BroadcastPair& x, F32x16 y) { return dot2(w, x, y); }
};

}  // namespace
}  // namespace quire
