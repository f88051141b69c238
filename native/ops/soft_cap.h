// Values held within limits by tanh (Gemma 2, sec. 2).
#pragma once
#include "ops/functions.h"
#include "ops/rows.h"
#include "plan/op.h"

namespace quire {

// out = cap * tanh(x / cap).
struct SoftCapOp {
  Rows x;  // f32
  Rows out;
  int64_t width;
  float cap;
  bool of_logit_rows;
};

namespace {

inline void soft_cap(const SoftCapOp& op, const Context& context) {
  const F32x16 cap = broadcast(op.cap), inverse = broadcast(1.0f / op.cap);
  write_chunks(op.out, num_rows(context, op.of_logit_rows), op.width, context,
               [&](int64_t t, int64_t first, int64_t columns, float* values) {
                 float whole[kLanes] = {};
                 const float* x = row<float>(op.x, t) + first;
                 for (int64_t i = 0; i < columns; i += kLanes) {
                   const int64_t count = columns - i < kLanes ? columns - i : kLanes;
                   memcpy(whole, x + i, static_cast<size_t>(count) * sizeof(float));
                   store(whole, cap * tanh(load(whole) * inverse));
                   memcpy(values + i, whole, static_cast<size_t>(count) * sizeof(float));
                 }
               });
}

QUIRE_OP(soft_cap, SoftCapOp, x, out, width, cap, of_logit_rows)

}  // namespace
}  // namespace quire
