// exp, erf, tanh and the activations made of them, as polynomials: the same bits on every instruction set.
#pragma once
#include "isa/simd.h"
#include "plan/types.h"

namespace quire {
namespace {

// Vectors that functions of many values compute side by side: the processor looks too few operations ahead to overlap
// whole chains.
#if defined(__AVX512F__)
constexpr int kSideBySide = 4;
#elif defined(__AVX2__) || defined(QUIRE_NEON)
constexpr int kSideBySide = 2;  // SiLU takes 12 % less time than with 1 or 4 (Zen 3)
#else
constexpr int kSideBySide = 1;
#endif

// e^x to about 2 ulp: x = n ln 2 + r with |r| <= ln 2 / 2, a Taylor polynomial of r of degree 7, and n added to its
// exponent: within the limits the result is a normal number. Below -87.3 it is 0, above 88.7 infinity; NaN stays NaN.
template <int N>
[[gnu::always_inline]] inline void exp(F32x16 (&x)[N]) {
  constexpr float kFactors[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
  const F32x16 low = broadcast(-87.3f), high = broadcast(88.7f), infinity = broadcast(__builtin_inff());
  F32x16 r[N], p[N];
  I32x16 exponent[N];
  QUIRE_UNROLL for (int i = 0; i < N; ++i) r[i] = min(max(x[i], low), high);
  QUIRE_UNROLL for (int i = 0; i < N; ++i) exponent[i] = round_to_int(r[i] * broadcast(1.44269504f));
  QUIRE_UNROLL for (int i = 0; i < N; ++i) p[i] = to_float(exponent[i]);
  QUIRE_UNROLL for (int i = 0; i < N; ++i) r[i] = fma(p[i], broadcast(-0.693359375f), r[i]);  // ln 2 in two parts
  QUIRE_UNROLL for (int i = 0; i < N; ++i) r[i] = fma(p[i], broadcast(2.12194440e-4f), r[i]);
  QUIRE_UNROLL for (int i = 0; i < N; ++i) p[i] = broadcast(1.0f / 5040.0f);
  QUIRE_UNROLL for (int term = 0; term < 7; ++term) {
    QUIRE_UNROLL for (int i = 0; i < N; ++i) p[i] = fma(p[i], r[i], broadcast(kFactors[term]));
  }
  QUIRE_UNROLL for (int i = 0; i < N; ++i) {
    const F32x16 result = float_of_bits(bits_of(p[i]) + shift_left<23>(exponent[i]));
    const F32x16 finite = select_less(x[i], low, zero(), select_less(high, x[i], infinity, result));
    x[i] = select_less(x[i], infinity, finite, x[i]);
  }
}
inline F32x16 exp(F32x16 x) {
  F32x16 one[1] = {x};
  exp(one);
  return one[0];
}

// 2^(x * scale) for products in [-120, 0]: relative error 8e-8 beside that of `scale`, 1 at 0. Adding 1.5 * 2^23 rounds
// the product to an integer and leaves that in the low bits, from where it goes into the exponent. The polynomial is
// of degree 6, of least maximum error with a first coefficient of 1.
inline F32x16 exp2_scaled(F32x16 x, F32x16 scale) {
  const F32x16 magic = broadcast(0x1.8p23f);
  const F32x16 rounded = fma(x, scale, magic);
  const F32x16 r = fma(x, scale, magic - rounded);
  F32x16 p = broadcast(0x1.41fbbcp-13f);
  p = fma(p, r, broadcast(0x1.5f3e54p-10f));
  p = fma(p, r, broadcast(0x1.3b2d4cp-7f));
  p = fma(p, r, broadcast(0x1.c6aee8p-5f));
  p = fma(p, r, broadcast(0x1.ebfbdcp-3f));
  p = fma(p, r, broadcast(0x1.62e430p-1f));
  p = fma(p, r, broadcast(1.0f));
  return float_of_bits(bits_of(p) + shift_left<23>(bits_of(rounded)));
}

// 2^x for x <= 1, to 1.9 ulp: the minimax polynomial of degree 5 with 2^0 = 1 on |x - n| <= 1/2, n added to its
// exponent. Adding 1.5 * 2^23 rounds x to n and leaves n in the lowest bits. Below -125 it is 0. A NaN stays one if its
// lowest nine bits are zero, as they are in results of arithmetic and in bf16 and fp16.
// N vectors step by step: two take a third less time than one after the other, since the processor looks too few
// operations ahead to overlap whole chains.
template <int N>
[[gnu::always_inline]] inline void exp2_of_non_positive(F32x16 (&x)[N]) {
  const F32x16 magic = broadcast(12582912.0f);
  F32x16 shifted[N], r[N], p[N];
  QUIRE_UNROLL for (int i = 0; i < N; ++i) shifted[i] = x[i] + magic;
  QUIRE_UNROLL for (int i = 0; i < N; ++i) r[i] = shifted[i] - magic;
  QUIRE_UNROLL for (int i = 0; i < N; ++i) r[i] = x[i] - r[i];
  QUIRE_UNROLL for (int i = 0; i < N; ++i) p[i] =
      fma(broadcast(0.0013264722656458616f), r[i], broadcast(0.009671480394899845f));
  QUIRE_UNROLL for (int i = 0; i < N; ++i) p[i] = fma(p[i], r[i], broadcast(0.055507462471723557f));
  QUIRE_UNROLL for (int i = 0; i < N; ++i) p[i] = fma(p[i], r[i], broadcast(0.24022240936756134f));
  QUIRE_UNROLL for (int i = 0; i < N; ++i) p[i] = fma(p[i], r[i], broadcast(0.6931469440460205f));
  QUIRE_UNROLL for (int i = 0; i < N; ++i) p[i] = fma(p[i], r[i], broadcast(1.0f));
  QUIRE_UNROLL for (int i = 0; i < N; ++i) p[i] = float_of_bits(bits_of(p[i]) + shift_left<23>(bits_of(shifted[i])));
  QUIRE_UNROLL for (int i = 0; i < N; ++i) x[i] = select_less(x[i], broadcast(-125.0f), zero(), p[i]);
}

inline F32x16 tanh(F32x16 x) { return broadcast(1.0f) - broadcast(2.0f) / (exp(x + x) + broadcast(1.0f)); }

// Abramowitz & Stegun 7.1.26, absolute error 1.5e-7.
inline F32x16 erf(F32x16 x) {
  const F32x16 a = abs(x), one = broadcast(1.0f);
  const F32x16 t = one / fma(broadcast(0.3275911f), a, one);
  F32x16 p = broadcast(1.061405429f);
  p = fma(p, t, broadcast(-1.453152027f));
  p = fma(p, t, broadcast(1.421413741f));
  p = fma(p, t, broadcast(-0.284496736f));
  p = fma(p, t, broadcast(0.254829592f));
  const F32x16 positive = one - p * t * exp(zero() - a * a);
  return select_less(x, zero(), zero() - positive, positive);
}

inline F32x16 activated(Activation activation, F32x16 x) {
  const F32x16 half = broadcast(0.5f), one = broadcast(1.0f);
  switch (activation) {
    case Activation::none:
      return x;
    case Activation::relu:
      return select_less(x, zero(), zero(), x);
    case Activation::gelu:
      return half * x * (one + erf(x * broadcast(0.70710678f)));
    case Activation::gelu_tanh: {
      const F32x16 inner = fma(x * x * x, broadcast(0.044715f), x) * broadcast(0.79788456f);
      return half * x * (one + tanh(inner));
    }
    case Activation::silu:
      return x / (one + exp(zero() - x));
    case Activation::relu2: {
      const F32x16 positive = select_less(x, zero(), zero(), x);
      return positive * positive;
    }
  }
  return x;
}

// x = activated(activation, x)
template <int N>
[[gnu::always_inline]] inline void activate(Activation activation, F32x16 (&x)[N]) {
  if (activation == Activation::silu) {
    F32x16 e[N];
    QUIRE_UNROLL for (int i = 0; i < N; ++i) e[i] = zero() - x[i];
    exp(e);
    QUIRE_UNROLL for (int i = 0; i < N; ++i) x[i] = x[i] / (broadcast(1.0f) + e[i]);
  } else {
    for (int i = 0; i < N; ++i) x[i] = activated(activation, x[i]);
  }
}

// out[i] = activation(x[i]), times factor[i] unless it is null. The last values may be fewer than the lanes.
inline void apply(Activation activation, const float* x, const float* factor, float* out, int64_t count) {
  constexpr int64_t kWidth = kSideBySide * kLanes;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    F32x16 y[kSideBySide];
    QUIRE_UNROLL for (int k = 0; k < kSideBySide; ++k) y[k] = load(x + i + k * kLanes);
    activate(activation, y);
    QUIRE_UNROLL for (int k = 0; k < kSideBySide; ++k) {
      store(out + i + k * kLanes, factor == nullptr ? y[k] : y[k] * load(factor + i + k * kLanes));
    }
  }
  for (; i + kLanes <= count; i += kLanes) {
    F32x16 value = activated(activation, load(x + i));
    if (factor != nullptr) value = value * load(factor + i);
    store(out + i, value);
  }
  if (i < count) {
    const size_t bytes = static_cast<size_t>(count - i) * sizeof(float);
    float values[kLanes] = {}, factors[kLanes] = {};
    memcpy(values, x + i, bytes);
    F32x16 value = activated(activation, load(values));
    if (factor != nullptr) {
      memcpy(factors, factor + i, bytes);
      value = value * load(factors);
    }
    store(values, value);
    memcpy(out + i, values, bytes);
  }
}

}  // namespace
}  // namespace quire
