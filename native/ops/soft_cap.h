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

// values[i] = cap * tanh(values[i] / cap). Not inlined, so that the loops that may call it stay as they are without.
[[gnu::noinline]] inline void cap_values(float* values, int64_t count, float cap) {
  const F32x16 factor = broadcast(cap), inverse = broadcast(1.0f / cap);
  float whole[kLanes] = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const size_t bytes = static_cast<size_t>(count - i < kLanes ? count - i : kLanes) * sizeof(float);
    memcpy(whole, values + i, bytes);
    store(whole, factor * tanh(load(whole) * inverse));
    memcpy(values + i, whole, bytes);
  }
}

inline void soft_cap(const SoftCapOp& op, const Context& context) {
  write_chunks(op.out, num_rows(context, op.of_logit_rows), op.width, context,
               [&](int64_t t, int64_t first, int64_t columns, float* values) {
                 memcpy(values, row<float>(op.x, t) + first, static_cast<size_t>(columns) * sizeof(float));
                 cap_values(values, columns, op.cap);
               });
}

QUIRE_OP(soft_cap, SoftCapOp, x, out, width, cap, of_logit_rows)

}  // namespace
}  // namespace quire
