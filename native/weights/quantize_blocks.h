// The quantisers of weights/quantize.h, once for all instruction sets. Block layouts: ggml-common.h of ggml.
#pragma once
#include <cstring>
#include <initializer_list>

#include "weights/half.h"
#include "weights/quantize_table.h"

namespace quire {
namespace {
namespace quantize {

// Eight weights; on every instruction set sums have the same order.
using Vector = float __attribute__((vector_size(32)));
constexpr int kLanes = 8;
constexpr int kSuperLen = 256;
constexpr float kTiny = 1e-30f;

inline float larger(float a, float b) { return a > b ? a : b; }
inline float smaller(float a, float b) { return a < b ? a : b; }

inline Vector load(const float* p) {
  Vector value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline float sum(const Vector& lanes) {
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

// Nearest, ties to even, for |value| < 2^22; kept within low … high.
template <typename T>
inline T round_within(T value, float low, float high) {
  value = value > low ? value : T{} + low;
  value = value < high ? value : T{} + high;
  return (value + 12582912.0f) - 12582912.0f;
}

inline float inverse_of(float value) { return __builtin_fabsf(value) > kTiny ? 1.0f / value : 0.0f; }

// Integers low … high.
struct Range {
  float low, high;
};

// w ≈ scale q + minimum.
struct Fit {
  float scale = 0.0f, minimum = 0.0f;
};

template <int N>
void round_all(const float* x, Fit fit, Range range, float* q) {
  const float inverse = inverse_of(fit.scale);
  for (int i = 0; i < N; ++i) q[i] = round_within((x[i] - fit.minimum) * inverse, range.low, range.high);
}

// Σ w (x - scale q - minimum)² with the best integers.
template <int N>
float error_of(const float* x, const float* w, Fit fit, Range range) {
  const float inverse = inverse_of(fit.scale);
  Vector error = {};
  for (int i = 0; i < N; i += kLanes) {
    const Vector shifted = load(x + i) - fit.minimum;
    const Vector rest = shifted - fit.scale * round_within(shifted * inverse, range.low, range.high);
    error += load(w + i) * rest * rest;
  }
  return sum(error);
}

// --- Without a minimum --------------------------------------------------------------------------------------------

// The scale of the smallest error. Candidates put the largest |x| on either side of either end of the range.
template <int N>
float fit_scale(const float* x, const float* w, Range range) {
  float extreme = 0.0f;
  for (int i = 0; i < N; ++i) extreme = __builtin_fabsf(x[i]) > __builtin_fabsf(extreme) ? x[i] : extreme;
  if (__builtin_fabsf(extreme) < kTiny) return 0.0f;
  float best_score = -1.0f, best = 0.0f;
  for (int candidate = -9; candidate <= 9; ++candidate) {
    for (const float sign : {-1.0f, 1.0f}) {
      const float inverse = sign * (0.1f * static_cast<float>(candidate) - range.low) / extreme;
      Vector xq = {}, qq = {};
      for (int i = 0; i < N; i += kLanes) {
        const Vector value = load(x + i), q = round_within(value * inverse, range.low, range.high);
        const Vector wq = load(w + i) * q;
        xq += wq * value;
        qq += wq * q;
      }
      const float top = sum(xq), bottom = sum(qq);
      // The error is Σ w x² less this.
      const float score = bottom > 0.0f ? top * top / bottom : 0.0f;
      if (score > best_score) {
        best_score = score;
        best = bottom > 0.0f ? top / bottom : 0.0f;
      }
    }
  }
  return best;
}

// --- With a minimum -----------------------------------------------------------------------------------------------

// The scale and the minimum of the smallest error. K-quants have no minimum above 0.
template <int N>
Fit fit_affine(const float* x, const float* w, Range range, bool has_positive_minima) {
  float low = x[0], high = x[0];
  for (int i = 1; i < N; ++i) {
    low = smaller(low, x[i]);
    high = larger(high, x[i]);
  }
  Vector lanes_w = {}, lanes_x = {}, lanes_xx = {};
  for (int i = 0; i < N; i += kLanes) {
    const Vector value = load(x + i), weight = load(w + i);
    lanes_w += weight;
    lanes_x += weight * value;
    lanes_xx += weight * value * value;
  }
  if (!has_positive_minima) low = smaller(low, 0.0f);
  if (high - low < kTiny) return {0.0f, low};
  const double sw = sum(lanes_w), sx = sum(lanes_x), sxx = sum(lanes_xx);
  double best_error = __builtin_inf();
  Fit best;
  const auto solve = [&](Fit start) {
    const float inverse = inverse_of(start.scale);
    Vector lanes_q = {}, lanes_xq = {}, lanes_qq = {};
    for (int i = 0; i < N; i += kLanes) {
      const Vector value = load(x + i), q = round_within((value - start.minimum) * inverse, range.low, range.high);
      const Vector wq = load(w + i) * q;
      lanes_q += wq;
      lanes_xq += wq * value;
      lanes_qq += wq * q;
    }
    const double sq = sum(lanes_q), sxq = sum(lanes_xq), sqq = sum(lanes_qq), determinant = sw * sqq - sq * sq;
    if (determinant <= 0.0) return;
    double scale = (sw * sxq - sx * sq) / determinant, minimum = (sqq * sx - sq * sxq) / determinant;
    if (!has_positive_minima && minimum > 0.0) {
      minimum = 0.0;
      scale = sxq / sqq;
    }
    const double error =
        sxx - 2.0 * (scale * sxq + minimum * sx - scale * minimum * sq) + scale * scale * sqq + minimum * minimum * sw;
    if (error < best_error) {
      best_error = error;
      best = {static_cast<float>(scale), static_cast<float>(minimum)};
    }
  };
  for (int candidate = 0; candidate <= 20; ++candidate) {
    solve({(high - low) / (range.high - 1.0f + 0.1f * static_cast<float>(candidate)), low});
  }
  for (int round = 0; round < 2; ++round) solve(best);
  return best;
}

// --- Writing ------------------------------------------------------------------------------------------------------

template <typename T>
void put(std::byte* p, T value) {
  std::memcpy(p, &value, sizeof value);
}
float put_half(std::byte* p, float value) {
  const uint16_t half = round_to_f16(value);
  put(p, half);
  return from_f16(half);
}

// Byte j: q[j] in its low half, q[j + num_bytes] in its high half.
void put_nibbles(std::byte* out, const uint8_t* q, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) {
    out[i] = static_cast<std::byte>((q[i] & 15) | ((q[i + num_bytes] & 15) << 4));
  }
}

// --- Blocks of 32 -------------------------------------------------------------------------------------------------

// Q8_0: d, 32 int8.
void encode_q8_0(const float* x, const float*, std::byte* out) {
  float extreme = 0.0f;
  for (int i = 0; i < 32; ++i) extreme = larger(extreme, __builtin_fabsf(x[i]));
  const float d = put_half(out, extreme / 127.0f);
  float q[32];
  round_all<32>(x, {d, 0.0f}, {-127.0f, 127.0f}, q);
  for (int i = 0; i < 32; ++i) out[2 + i] = static_cast<std::byte>(static_cast<int8_t>(q[i]));
}

// Q4_0, Q4_1, Q5_0, Q5_1: d, m for _1, the fifth bits for Q5, nibbles.
template <int kBits, bool kHasMinimum>
void encode_32(const float* x, const float* w, std::byte* out) {
  constexpr float kLevels = 1 << kBits;
  constexpr Range range = kHasMinimum ? Range{0.0f, kLevels - 1.0f} : Range{-kLevels / 2.0f, kLevels / 2.0f - 1.0f};
  const Fit wanted = kHasMinimum ? fit_affine<32>(x, w, range, true) : Fit{fit_scale<32>(x, w, range), 0.0f};
  Fit fit{put_half(out, wanted.scale), 0.0f};
  out += 2;
  if (kHasMinimum) {
    fit.minimum = put_half(out, wanted.minimum);
    out += 2;
  }
  float rounded[32];
  uint8_t q[32];
  round_all<32>(x, fit, range, rounded);
  for (int i = 0; i < 32; ++i) q[i] = static_cast<uint8_t>(rounded[i] - range.low);
  if (kBits == 5) {
    uint32_t fifth = 0;
    for (int i = 0; i < 32; ++i) fifth |= static_cast<uint32_t>(q[i] >> 4) << i;
    put(out, fifth);
    out += 4;
  }
  put_nibbles(out, q, 16);
}

// --- Blocks of 256 with scales of scales --------------------------------------------------------------------------

// Groups of N weights: x ≈ d s q, s one of `scales`.
template <int N>
struct SymmetricBlock {
  static constexpr int kGroups = kSuperLen / N;
  float d = 0.0f;
  float scales[kGroups] = {};
  float q[kSuperLen] = {};

  void fit(const float* x, const float* w, Range range, Range scale_range) {
    float wanted[kGroups], extreme = 0.0f;
    for (int g = 0; g < kGroups; ++g) {
      wanted[g] = fit_scale<N>(x + g * N, w + g * N, range);
      extreme = __builtin_fabsf(wanted[g]) > __builtin_fabsf(extreme) ? wanted[g] : extreme;
    }
    if (__builtin_fabsf(extreme) < kTiny) return;
    d = from_f16(round_to_f16(extreme / scale_range.low));
    const float inverse = inverse_of(d);
    for (int g = 0; g < kGroups; ++g) scales[g] = round_within(wanted[g] * inverse, scale_range.low, scale_range.high);
    float best_error = refine_scales(x, w, range, scale_range);
    // The best d for these scales and integers; it may make other scales better.
    float top = 0.0f, bottom = 0.0f;
    for (int g = 0; g < kGroups; ++g) {
      for (int i = g * N; i < (g + 1) * N; ++i) {
        const float sq = scales[g] * q[i];
        top += w[i] * x[i] * sq;
        bottom += w[i] * sq * sq;
      }
    }
    SymmetricBlock other = *this;
    other.d = bottom > 0.0f ? from_f16(round_to_f16(top / bottom)) : 0.0f;
    if (other.refine_scales(x, w, range, scale_range) < best_error) *this = other;
  }

  // Tries each scale's neighbours, then rounds the weights. Returns the error.
  float refine_scales(const float* x, const float* w, Range range, Range scale_range) {
    float error = 0.0f;
    for (int g = 0; g < kGroups; ++g) {
      float best_error = __builtin_inff(), best = scales[g];
      for (const float step : {0.0f, -1.0f, 1.0f}) {
        const float scale = scales[g] + step;
        if (scale < scale_range.low || scale > scale_range.high) continue;
        const float found = error_of<N>(x + g * N, w + g * N, {d * scale, 0.0f}, range);
        if (found < best_error) {
          best_error = found;
          best = scale;
        }
      }
      scales[g] = best;
      error += best_error;
      round_all<N>(x + g * N, {d * best, 0.0f}, range, q + g * N);
    }
    return error;
  }
};

// Groups of N weights: x ≈ d s q - dmin m, s and m from 0 to `most`.
template <int N>
struct AffineBlock {
  static constexpr int kGroups = kSuperLen / N;
  float d = 0.0f, dmin = 0.0f;
  float scales[kGroups] = {}, minima[kGroups] = {};
  float q[kSuperLen] = {};

  void fit(const float* x, const float* w, Range range, float most) {
    Fit wanted[kGroups];
    float largest_scale = 0.0f, largest_minimum = 0.0f;
    for (int g = 0; g < kGroups; ++g) {
      wanted[g] = fit_affine<N>(x + g * N, w + g * N, range, false);
      largest_scale = larger(largest_scale, wanted[g].scale);
      largest_minimum = larger(largest_minimum, -wanted[g].minimum);
    }
    d = from_f16(round_to_f16(largest_scale / most));
    dmin = from_f16(round_to_f16(largest_minimum / most));
    const float inverse_d = inverse_of(d), inverse_dmin = inverse_of(dmin);
    for (int g = 0; g < kGroups; ++g) {
      scales[g] = round_within(wanted[g].scale * inverse_d, 0.0f, most);
      minima[g] = round_within(-wanted[g].minimum * inverse_dmin, 0.0f, most);
    }
    float best_error = refine_scales(x, w, range, most);
    for (int round = 0; round < 2; ++round) {
      AffineBlock other = *this;
      if (!other.solve_factors(x, w)) return;
      const float error = other.refine_scales(x, w, range, most);
      if (!(error < best_error)) return;
      best_error = error;
      *this = other;
    }
  }

  // The best d and dmin for these scales, minima and integers.
  bool solve_factors(const float* x, const float* w) {
    double aa = 0.0, ab = 0.0, bb = 0.0, xa = 0.0, xb = 0.0;
    for (int g = 0; g < kGroups; ++g) {
      const double b = -minima[g];
      for (int i = g * N; i < (g + 1) * N; ++i) {
        const double a = static_cast<double>(scales[g]) * q[i], weight = w[i], value = x[i];
        aa += weight * a * a;
        ab += weight * a * b;
        bb += weight * b * b;
        xa += weight * value * a;
        xb += weight * value * b;
      }
    }
    const double determinant = aa * bb - ab * ab;
    if (determinant <= 0.0) return false;
    const double new_d = (xa * bb - xb * ab) / determinant, new_dmin = (xb * aa - xa * ab) / determinant;
    if (new_d < 0.0 || new_dmin < 0.0) return false;
    d = from_f16(round_to_f16(static_cast<float>(new_d)));
    dmin = from_f16(round_to_f16(static_cast<float>(new_dmin)));
    return true;
  }

  // Tries the neighbours of each scale and minimum, then rounds the weights. Returns the error.
  float refine_scales(const float* x, const float* w, Range range, float most) {
    float error = 0.0f;
    for (int g = 0; g < kGroups; ++g) {
      float best_error = __builtin_inff(), best_scale = scales[g], best_minimum = minima[g];
      for (const float scale_step : {0.0f, -1.0f, 1.0f}) {
        for (const float minimum_step : {0.0f, -1.0f, 1.0f}) {
          const float scale = scales[g] + scale_step, minimum = minima[g] + minimum_step;
          if (scale < 0.0f || scale > most || minimum < 0.0f || minimum > most) continue;
          const float found = error_of<N>(x + g * N, w + g * N, {d * scale, -dmin * minimum}, range);
          if (found < best_error) {
            best_error = found;
            best_scale = scale;
            best_minimum = minimum;
          }
        }
      }
      scales[g] = best_scale;
      minima[g] = best_minimum;
      error += best_error;
      round_all<N>(x + g * N, {d * best_scale, -dmin * best_minimum}, range, q + g * N);
    }
    return error;
  }
};

// Q4_K, Q5_K: d, dmin, 12 bytes with eight scales and minima of 6 bits, the fifth bits for Q5_K, nibbles.
template <int kBits>
void encode_q45_k(const float* x, const float* w, std::byte* out) {
  AffineBlock<32> block;
  block.fit(x, w, {0.0f, (1 << kBits) - 1.0f}, 63.0f);
  put_half(out, block.d);
  put_half(out + 2, block.dmin);
  uint8_t packed[12] = {};
  for (int g = 0; g < 8; ++g) {
    const auto scale = static_cast<uint8_t>(block.scales[g]), minimum = static_cast<uint8_t>(block.minima[g]);
    if (g < 4) {
      packed[g] |= scale;
      packed[g + 4] |= minimum;
    } else {
      packed[g + 4] = static_cast<uint8_t>((scale & 15) | ((minimum & 15) << 4));
      packed[g - 4] |= static_cast<uint8_t>(scale >> 4 << 6);
      packed[g] |= static_cast<uint8_t>(minimum >> 4 << 6);
    }
  }
  std::memcpy(out + 4, packed, sizeof packed);
  out += 16;
  uint8_t q[kSuperLen];
  for (int i = 0; i < kSuperLen; ++i) q[i] = static_cast<uint8_t>(block.q[i]);
  if (kBits == 5) {
    for (int i = 0; i < 32; ++i) {
      int fifth = 0;
      for (int g = 0; g < 8; ++g) fifth |= (q[g * 32 + i] >> 4) << g;
      out[i] = static_cast<std::byte>(fifth);
    }
    out += 32;
  }
  for (int pair = 0; pair < 4; ++pair) put_nibbles(out + pair * 32, q + pair * 64, 32);
}

// Q6_K: twice 64 bytes of low halves, twice 32 bytes with the upper two bits, 16 scales, d.
void encode_q6_k(const float* x, const float* w, std::byte* out) {
  SymmetricBlock<16> block;
  block.fit(x, w, {-32.0f, 31.0f}, {-128.0f, 127.0f});
  uint8_t q[kSuperLen];
  for (int i = 0; i < kSuperLen; ++i) q[i] = static_cast<uint8_t>(block.q[i] + 32.0f);
  for (int part = 0; part < 2; ++part) {
    put_nibbles(out + part * 64, q + part * 128, 64);
    for (int i = 0; i < 32; ++i) {
      int upper = 0;
      for (int k = 0; k < 4; ++k) upper |= (q[part * 128 + k * 32 + i] >> 4) << (2 * k);
      out[128 + part * 32 + i] = static_cast<std::byte>(upper);
    }
  }
  for (int g = 0; g < 16; ++g) out[192 + g] = static_cast<std::byte>(static_cast<int8_t>(block.scales[g]));
  put_half(out + 208, block.d);
}

// Two bits of each weight: byte i of 32 has those of weights i, i + 32, i + 64 and i + 96, for each half of a block.
void put_crumbs(std::byte* out, const uint8_t* q) {
  for (int part = 0; part < 2; ++part) {
    for (int i = 0; i < 32; ++i) {
      int bits = 0;
      for (int k = 0; k < 4; ++k) bits |= (q[part * 128 + k * 32 + i] & 3) << (2 * k);
      out[part * 32 + i] = static_cast<std::byte>(bits);
    }
  }
}

// Q2_K: scales and minima of 4 bits, two bits of each weight, d, dmin.
void encode_q2_k(const float* x, const float* w, std::byte* out) {
  AffineBlock<16> block;
  block.fit(x, w, {0.0f, 3.0f}, 15.0f);
  for (int g = 0; g < 16; ++g) {
    out[g] = static_cast<std::byte>(static_cast<int>(block.scales[g]) | (static_cast<int>(block.minima[g]) << 4));
  }
  uint8_t q[kSuperLen];
  for (int i = 0; i < kSuperLen; ++i) q[i] = static_cast<uint8_t>(block.q[i]);
  put_crumbs(out + 16, q);
  put_half(out + 80, block.d);
  put_half(out + 82, block.dmin);
}

// Q3_K: the third bits, two bits of each weight, 16 scales of 6 bits: low halves of all, then upper two bits; d.
void encode_q3_k(const float* x, const float* w, std::byte* out) {
  SymmetricBlock<16> block;
  block.fit(x, w, {-4.0f, 3.0f}, {-32.0f, 31.0f});
  uint8_t q[kSuperLen], scales[16];
  for (int i = 0; i < kSuperLen; ++i) q[i] = static_cast<uint8_t>(block.q[i] + 4.0f);
  for (int g = 0; g < 16; ++g) scales[g] = static_cast<uint8_t>(block.scales[g] + 32.0f);
  for (int i = 0; i < 32; ++i) {
    int third = 0;
    for (int g = 0; g < 8; ++g) third |= (q[g * 32 + i] >> 2) << g;
    out[i] = static_cast<std::byte>(third);
  }
  put_crumbs(out + 32, q);
  put_nibbles(out + 96, scales, 8);
  for (int i = 0; i < 4; ++i) {
    int upper = 0;
    for (int k = 0; k < 4; ++k) upper |= (scales[k * 4 + i] >> 4) << (2 * k);
    out[104 + i] = static_cast<std::byte>(upper);
  }
  put_half(out + 108, block.d);
}

constexpr BlockQuantizer kQuantizers[kNumQuantizers] = {
    {"Q4_0", 32, 18, encode_32<4, false>}, {"Q4_1", 32, 20, encode_32<4, true>}, {"Q5_0", 32, 22, encode_32<5, false>},
    {"Q5_1", 32, 24, encode_32<5, true>},  {"Q8_0", 32, 34, encode_q8_0},        {"Q2_K", 256, 84, encode_q2_k},
    {"Q3_K", 256, 110, encode_q3_k},       {"Q4_K", 256, 144, encode_q45_k<4>},  {"Q5_K", 256, 176, encode_q45_k<5>},
    {"Q6_K", 256, 210, encode_q6_k},
};

}  // namespace quantize
}  // namespace
}  // namespace quire
