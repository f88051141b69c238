// Rotary position embedding of heads (RoPE: Su 2021, eq. 34) by the angles of rotary.h.
#pragma once
#include "isa/simd.h"
#include "plan/op.h"

namespace quire {

// The first 2 * half of each head's values turned by pairs (i, i + half), the others copied. f32 [T, heads, head_size];
// x and out may be the same rows.
struct RopeOp {
  Rows x;
  Rows out;
  int64_t num_heads;
  int64_t head_size;
  const float* cos;  // [T, half]
  const float* sin;
  int64_t half;
};

namespace {

// Pairs (x[i], x[i + half]) turned by the angles.
inline void rotate(float* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F32x16 a = load(x + i), b = load(x + i + half), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + i + half, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

inline void rope(const RopeOp& op, const Context& context) {
  const Range mine = share(context.step->num_tokens * op.num_heads, context);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t t = item / op.num_heads, first = item % op.num_heads * op.head_size;
    float* out = row<float>(op.out, t) + first;
    memmove(out, row<float>(op.x, t) + first, static_cast<size_t>(op.head_size) * sizeof(float));
    rotate(out, op.cos + t * op.half, op.sin + t * op.half, op.half);
  }
}

QUIRE_OP(rope, RopeOp, x, out, num_heads, head_size, cos, sin, half)

}  // namespace
}  // namespace quire
