// RMS norm (Zhang & Sennrich 2019, eq. 4) and layer norm (Ba 2016, eq. 4) of fp32 rows, written in the type that the
// next layer reads. Sums run over 16 lanes, then a fixed tree.
#pragma once
#include "ops/functions.h"
#include "ops/rows.h"
#include "plan/op.h"

namespace quire {

// Layer norm if subtract_mean, else RMS norm, with 0 for the mean: out = (x - mean) * rsqrt(mean of (x - mean)^2 +
// epsilon) * weight + bias. A null weight is 1, a null bias 0. Each row is `groups` (0: 1) such vectors, as heads are,
// which share the weight or have one each. add: out += that (f32 rows). With `gates` x, or without gates_first the
// result, is multiplied by activation(gates) before it is added.
struct NormOp {
  Rows x;    // f32
  Rows out;  // any type
  const float* weight;
  const float* bias;
  int64_t width;  // of a group
  float epsilon;
  bool subtract_mean;
  int64_t groups;
  bool weight_per_group;
  bool add;
  bool of_logit_rows;
  Rows gates;  // f32; null without
  Activation activation;
  bool gates_first;
};

namespace {

// out[i] = (x[i] - mean) * rsqrt(mean of squares of that + epsilon) * weight[i] + bias[i]; mean 0 unless subtract_mean.
inline void normalise(const float* x, const float* weight, const float* bias, float* out, int64_t width, float epsilon,
                      bool subtract_mean) {
  const int64_t whole = width - width % kLanes;
  float tail[kLanes] = {};
  memcpy(tail, x + whole, static_cast<size_t>(width - whole) * sizeof(float));
  float mean = 0.0f;
  if (subtract_mean) {
    F32x16 total = load(tail);
    for (int64_t i = 0; i < whole; i += kLanes) total = total + load(x + i);
    mean = sum(total) / static_cast<float>(width);
  }
  F32x16 squares = zero();
  for (int64_t i = 0; i < whole; i += kLanes) {
    const F32x16 value = load(x + i) - broadcast(mean);
    squares = fma(value, value, squares);
  }
  for (int64_t i = whole; i < width; ++i) tail[i - whole] -= mean;
  squares = fma(load(tail), load(tail), squares);
  const float scale = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + epsilon);
  for (int64_t i = 0; i < whole; i += kLanes) {
    F32x16 value = (load(x + i) - broadcast(mean)) * broadcast(scale);
    if (weight != nullptr) value = value * load(weight + i);
    if (bias != nullptr) value = value + load(bias + i);
    store(out + i, value);
  }
  for (int64_t i = whole; i < width; ++i) {
    float value = tail[i - whole] * scale;
    if (weight != nullptr) value = value * weight[i];
    if (bias != nullptr) value = value + bias[i];
    out[i] = value;
  }
}

inline void norm(const NormOp& op, const Context& context) {
  const Range mine = share(num_rows(context, op.of_logit_rows), context);
  const int64_t width = op.groups > 1 ? op.groups * op.width : op.width;
  float* values = reinterpret_cast<float*>(context.scratch);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const float* x = row<float>(op.x, t);
    const float* gates = op.gates.data != nullptr ? row<float>(op.gates, t) : nullptr;
    if (gates != nullptr && op.gates_first) {
      apply(op.activation, gates, x, values, width);
      x = values;
    }
    for (int64_t i = 0; i < width; i += op.width) {
      normalise(x + i, op.weight + (op.weight_per_group ? i : 0), op.bias, values + i, op.width, op.epsilon,
                op.subtract_mean);
    }
    if (gates != nullptr && !op.gates_first) apply(op.activation, gates, values, values, width);
    if (op.add) {
      add_values(values, width, row<float>(op.out, t));
      continue;
    }
    write_columns(op.out, t, 0, width, values);
    finish_row(op.out, t, width);
  }
}

QUIRE_OP(norm, NormOp, x, out, weight, bias, width, epsilon, subtract_mean, groups, weight_per_group, add,
         of_logit_rows, gates, activation, gates_first)

}  // namespace
}  // namespace quire
