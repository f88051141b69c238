// What the kernels of attend_tile.h must know of a format of keys and values: how to take one step of a score (some
// dimensions of 16 tokens) and one of a weighted sum (16 dimensions of a token or a pair), and how queries and weights
// are stored to be broadcast.
//
// Orders of operations, the same on every instruction set:
//   f32, f16, FP8: score = fma(q[d], k[d], score) for d = 0, 1, …; sum = fma(p[t], v[t], sum) for t = 0, 1, …
//   bf16      queries and weights rounded to bf16, both in pairs (d, d + 1), (t, t + 1) as VDPBF16PS adds them
//   i8        queries as int8 with a scale of their own, weights times the values' scales as int16 with a scale per
//             tile: integer sums are exact
#pragma once
#include "isa/simd_bf16.h"
#include "isa/simd_f16.h"
#include "isa/simd_f8.h"
#include "isa/simd_int.h"
#include "ops/kv_cache.h"

namespace quire {
namespace {

// A kernel keeps kRows x kVectors sums in registers, beside kVectors vectors of keys or values and one broadcast. On
// AVX2 bf16 takes 10 % longer with five or six rows than with four.
#if defined(__AVX512F__)
constexpr int kWideRows = 6, kWideVectors = 4, kPairRows = 6, kPairVectors = 2;
#elif defined(__AVX2__)
constexpr int kWideRows = 4, kWideVectors = 1, kPairRows = 4, kPairVectors = 1;
#elif defined(QUIRE_NEON)
constexpr int kWideRows = 6, kWideVectors = 1, kPairRows = 6, kPairVectors = 1;
#else
constexpr int kWideRows = 1, kWideVectors = 1, kPairRows = 1, kPairVectors = 1;
#endif

// kDims, kTokens: in a step of a score, of a weighted sum. kKeyBytes, kValueBytes: of a step's vector. kQueryBytes,
// kWeightBytes: of what is broadcast in a step. kParts: of a step, each a vector and a broadcast to be multiplied; one
// after the other they need fewer registers.
struct F32Kv {
  static constexpr int64_t kDims = 1, kTokens = 1, kKeyBytes = 64, kValueBytes = 64, kQueryBytes = 4, kWeightBytes = 4;
  static constexpr int kRows = kWideRows, kVectors = kWideVectors;
  static constexpr int kParts = 1;
  static constexpr bool kScaled = false;
  using Sum = F32x16;
  using Number = float;
  static Sum none() { return zero(); }
  static F32x16 key(const std::byte* p, int) { return load(reinterpret_cast<const float*>(p)); }
  static F32x16 query(const std::byte* p, int) { return broadcast(*reinterpret_cast<const float*>(p)); }
  static F32x16 value(const std::byte* p, int) { return key(p, 0); }
  static F32x16 weight(const std::byte* p, int) { return query(p, 0); }
  static F32x16 add(F32x16 a, F32x16 b, F32x16 y) { return fma(a, b, y); }
  static void store_query(std::byte* to, F32x16 q) { store(reinterpret_cast<float*>(to), q); }
  static void store_weights(std::byte* to, F32x16 p) { store(reinterpret_cast<float*>(to), p); }
  static void store_weights(std::byte* to, F32x16 p, F32x16 q) {
    store_weights(to, p);
    store_weights(to + 64, q);
  }
};

struct F16Kv : F32Kv {
  static constexpr int64_t kKeyBytes = 32, kValueBytes = 32;
  static F32x16 key(const std::byte* p, int) { return widen_f16(reinterpret_cast<const uint16_t*>(p)); }
  static F32x16 value(const std::byte* p, int) { return key(p, 0); }
};

struct E4m3Kv : F32Kv {
  static constexpr int64_t kKeyBytes = 16, kValueBytes = 16;
  static F32x16 key(const std::byte* p, int) { return widen_e4m3(reinterpret_cast<const uint8_t*>(p)); }
  static F32x16 value(const std::byte* p, int) { return key(p, 0); }
};

struct E5m2Kv : F32Kv {
  static constexpr int64_t kKeyBytes = 16, kValueBytes = 16;
  static F32x16 key(const std::byte* p, int) { return widen_e5m2(reinterpret_cast<const uint8_t*>(p)); }
  static F32x16 value(const std::byte* p, int) { return key(p, 0); }
};

struct Bf16Kv {
  static constexpr int64_t kDims = 2, kTokens = 2, kKeyBytes = 64, kValueBytes = 64;
  static constexpr bool kScaled = false;
  using Sum = F32x16;
  using Number = float;
  static Sum none() { return zero(); }
#if defined(QUIRE_BF16_PAIRS)
  static constexpr int kParts = 1;
  static constexpr int64_t kQueryBytes = 4, kWeightBytes = 4;
  static constexpr int kRows = kWideRows, kVectors = kWideVectors;
  static Pairs key(const std::byte* p, int) { return load_pairs(p); }
  static BroadcastPair query(const std::byte* p, int) { return broadcast_pair(p); }
  static Pairs value(const std::byte* p, int) { return load_pairs(p); }
  static BroadcastPair weight(const std::byte* p, int) { return broadcast_pair(p); }
  static F32x16 add(const Pairs& a, const BroadcastPair& b, F32x16 y) { return dot2(a, b, y); }
  static void store_query(std::byte* to, F32x16 q) { store_bf16(reinterpret_cast<uint16_t*>(to), q); }
#if defined(__AVX512BF16__)
  // The instruction takes denormals for zero: there are none among weights.
  static void store_weights(std::byte* to, F32x16 p) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(p.v));
  }
  static void store_weights(std::byte* to, F32x16 p, F32x16 q) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(q.v, p.v));
  }
#else
  static void store_weights(std::byte* to, F32x16 p) { store_query(to, p); }
  static void store_weights(std::byte* to, F32x16 p, F32x16 q) {
    store_query(to, p);
    store_query(to + 32, q);
  }
#endif
#else
  // Queries and weights are widened once for all uses. The odd halves come first, as in dot2.
  static constexpr int kParts = 2;
  static constexpr int64_t kQueryBytes = 8, kWeightBytes = 8;
  static constexpr int kRows = kPairRows, kVectors = kPairVectors;
  static F32x16 key(const std::byte* p, int part) { return part == 0 ? odd_of_pairs(p) : even_of_pairs(p); }
  static F32x16 query(const std::byte* p, int part) { return broadcast(reinterpret_cast<const float*>(p)[1 - part]); }
  static F32x16 value(const std::byte* p, int part) { return key(p, part); }
  static F32x16 weight(const std::byte* p, int part) { return query(p, part); }
  static F32x16 add(F32x16 a, F32x16 b, F32x16 y) { return fma(a, b, y); }
  static void store_query(std::byte* to, F32x16 q) { store(reinterpret_cast<float*>(to), rounded_to_bf16(q)); }
  static void store_weights(std::byte* to, F32x16 p) { store_query(to, p); }
  static void store_weights(std::byte* to, F32x16 p, F32x16 q) {
    store_query(to, p);
    store_query(to + 64, q);
  }
#endif
};

struct I8Kv {
  static constexpr int64_t kDims = 4, kTokens = 2, kKeyBytes = 64, kValueBytes = 32, kQueryBytes = kQuadBytes,
                           kWeightBytes = 4;
  static constexpr int kRows = kWideRows, kVectors = kWideVectors;
  static constexpr int kParts = 1;
  static constexpr bool kScaled = true;
  using Sum = I32x16;
  using Number = int32_t;
  static Sum none() { return zero_i(); }
  static Quads key(const std::byte* p, int) { return load_quads(p); }
  static SignedQuads query(const std::byte* p, int) { return broadcast_quad(p); }
  static I32x16 add(const Quads& k, const SignedQuads& q, I32x16 y) { return dot4(k, q, y); }
  static Shorts value(const std::byte* p, int) { return load_shorts(p); }
  static BroadcastShorts weight(const std::byte* p, int) { return broadcast_shorts(p); }
  static I32x16 add(const Shorts& v, const BroadcastShorts& p, I32x16 y) { return dot2(v, p, y); }
};

}  // namespace
}  // namespace quire
