// Cosines and sines of a step's positions (RoPE: Su 2021, sec. 3.4.2), once per step for all layers.
#pragma once
#include "plan/op.h"

namespace quire {

// Angles of the step's positions: cos, sin [T, half], each position in fp32 times frequencies[half]. Both are
// multiplied by scales[position / scale_period], by the last of the scales past their end, and by 1 if there are none.
struct RotaryOp {
  const float* frequencies;
  float* cos;
  float* sin;
  int64_t half;
  const float* scales;  // [num_scales] or null
  int64_t num_scales;
  int64_t scale_period;
};

namespace {

// cos and sin of a non-negative angle, in double: reduced by multiples of pi / 2 in three parts, then Taylor
// polynomials on |r| <= pi / 4. The C library's functions differ between machines in the last bit; these do not.
inline void cos_sin(double angle, float* cos, float* sin) {
  const double n = __builtin_nearbyint(angle * 0.63661977236758134308);
  double r = angle - n * 1.57079632673412561417;
  r -= n * 6.07710050630396597660e-11;
  r -= n * 2.02226624879595063154e-21;
  const double z = r * r;
  const double s =
      r + r * z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880 + z * (-1.0 / 39916800)))));
  const double c =
      1.0 + z * (-0.5 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 + z * (-1.0 / 3628800 + z / 479001600)))));
  const int quadrant = static_cast<int>(static_cast<int64_t>(n) & 3);
  const double cosines[4] = {c, -s, -c, s}, sines[4] = {s, c, -s, -c};
  *cos = static_cast<float>(cosines[quadrant]);
  *sin = static_cast<float>(sines[quadrant]);
}

inline void rotary(const RotaryOp& op, const Context& context) {
  const Range mine = share(context.step->num_tokens, context);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const float position = static_cast<float>(context.step->positions[t]);
    float *cos = op.cos + t * op.half, *sin = op.sin + t * op.half;
    for (int64_t i = 0; i < op.half; ++i) {
      const float angle = position * op.frequencies[i];  // rounded to fp32, as Transformers does
      cos_sin(static_cast<double>(angle), cos + i, sin + i);
    }
    if (op.scales == nullptr) continue;
    const int64_t period = context.step->positions[t] / op.scale_period;
    const float scale = op.scales[period < op.num_scales ? period : op.num_scales - 1];
    for (int64_t i = 0; i < op.half; ++i) {
      cos[i] *= scale;
      sin[i] *= scale;
    }
  }
}

QUIRE_OP(rotary, RotaryOp, frequencies, cos, sin, half, scales, num_scales, scale_period)

}  // namespace
}  // namespace quire
