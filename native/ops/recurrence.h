// Linear recurrences: a matrix per head that every token decays, adds to and reads. Gated delta rule (Yang 2024), Mamba
// 2's state space (Dao & Gu 2024) and plain linear attention (Katharopoulos 2020).
//
// Tokens are computed one after another, so that results do not depend on how a prompt is cut. 64 columns of a state at
// a time stay in the L1 cache while all new tokens of a request pass.
#pragma once
#include "ops/functions.h"
#include "plan/op.h"

namespace quire {

// S is a head's state [key_size, value_size], h the head, g = h / (num_heads / num_key_heads) its key head:
//   dt = softplus(gates[t, h] + time_bias[h]), or 1 without gates;  decay = exp(-exp(log_rates[h]) * dt), or 1 without
//   S = decay * S;  S = S + k[t, g] (x) u;  out[t, h] = S^T q[t, g] + skip[h] * v[t, h]
// with u = dt * v[t, h]; or with `delta` u = sigmoid(gates[t, num_heads + h]) * (v[t, h] - S^T k[t, g]), where k and q
// are divided by their lengths (squares + 1e-6) and q by sqrt(key_size) too.
//
// A state is stored [value_size / 16, rounded up][key_size][16] of f32; it is zero before the first token.
struct RecurrenceOp {
  Rows q;      // f32 [T, num_key_heads * key_size]
  Rows k;      // f32 [T, num_key_heads * key_size]
  Rows v;      // f32 [T, num_heads * value_size]
  Rows gates;  // f32 [T, num_heads], twice as wide with `delta`; null without time steps
  Rows out;    // f32 [T, num_heads * value_size]
  const float* log_rates;
  const float* time_bias;
  const float* skip;
  std::byte* state;  // of page 0
  int64_t state_stride;
  int64_t group;  // which block tables: their first entry is the page
  int64_t num_key_heads;
  int64_t num_heads;
  int64_t key_size;
  int64_t value_size;
  bool delta;
};

namespace {

constexpr int kStateVectors = 4;  // of columns that are computed together

inline float first_lane(F32x16 a) {
  float lanes[kLanes];
  store(lanes, a);
  return lanes[0];
}

// log(1 + e^x) = max(x, 0) + log(1 + y) with y = e^-|x|, and log(1 + y) = 2 artanh(y / (2 + y)): with an argument of at
// most 1/3 its series of eight terms is exact to 2e-9.
inline float softplus(float x) {
  const F32x16 y = exp(zero() - abs(broadcast(x))), z = y / (broadcast(2.0f) + y), square = z * z;
  F32x16 p = broadcast(1.0f / 15.0f);
  for (int n = 13; n >= 1; n -= 2) p = fma(p, square, broadcast(1.0f / static_cast<float>(n)));
  const float positive = x < 0.0f ? 0.0f : x;
  return positive + 2.0f * first_lane(z * p);
}

// out = x * scale / sqrt(sum of squares + 1e-6)
inline void unit_vector(const float* x, int64_t size, float scale, float* out) {
  F32x16 total = zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) total = fma(load(x + i), load(x + i), total);
  float squares = sum(total);
  for (; i < size; ++i) squares = __builtin_fmaf(x[i], x[i], squares);
  const float factor = scale / __builtin_sqrtf(squares + 1e-6f);
  for (i = 0; i < size; ++i) out[i] = x[i] * factor;
}

// One token's factors: of the state, of what is added to it.
struct Factors {
  float decay, strength;
};
inline Factors factors_of(const RecurrenceOp& op, int64_t token, int64_t head) {
  const float* gates = op.gates.data != nullptr ? row<float>(op.gates, token) : nullptr;
  const float bias = op.time_bias != nullptr ? op.time_bias[head] : 0.0f;
  const float dt = gates != nullptr ? softplus(gates[head] + bias) : 1.0f;
  float decay = 1.0f;
  if (op.log_rates != nullptr) {
    decay = first_lane(exp(zero() - exp(broadcast(op.log_rates[head])) * broadcast(dt)));
  }
  if (!op.delta) return {decay, dt};
  const F32x16 sigmoid = broadcast(1.0f) / (broadcast(1.0f) + exp(zero() - broadcast(gates[op.num_heads + head])));
  return {decay, first_lane(sigmoid)};
}

// All tokens of a request through `count` (at most 16 N) columns of a head's state from column `first` on.
template <int N>
inline void pass_tokens(const RecurrenceOp& op, const Step& step, int64_t r, int64_t head, int64_t first, int64_t count,
                        float* state, float* scratch) {
  const int64_t size = op.key_size, key_at = head / (op.num_heads / op.num_key_heads) * size;
  const int64_t value_at = head * op.value_size + first, vector = size * kLanes;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(size));
  const size_t bytes = static_cast<size_t>(count) * sizeof(float);
  float values[N * kLanes] = {}, results[N * kLanes];
  for (int64_t token = step.first_tokens[r]; token < step.first_tokens[r + 1]; ++token) {
    const float *q = row<float>(op.q, token) + key_at, *k = row<float>(op.k, token) + key_at;
    const Factors factors = factors_of(op, token, head);
    const F32x16 decay = broadcast(factors.decay), strength = broadcast(factors.strength);
    memcpy(values, row<float>(op.v, token) + value_at, bytes);
    F32x16 added[N], out[N];
    QUIRE_UNROLL for (int n = 0; n < N; ++n) {
      added[n] = zero();
      out[n] = zero();
    }
    if (op.delta) {
      unit_vector(q, size, scale, scratch);
      unit_vector(k, size, 1.0f, scratch + size);
      q = scratch;
      k = scratch + size;
      for (int64_t i = 0; i < size; ++i) {
        const F32x16 key = broadcast(k[i]);
        QUIRE_UNROLL for (int n = 0; n < N; ++n) added[n] = fma(load(state + n * vector + i * kLanes), key, added[n]);
      }
      QUIRE_UNROLL for (int n = 0; n < N; ++n) added[n] = load(values + n * kLanes) - decay * added[n];
    } else {
      QUIRE_UNROLL for (int n = 0; n < N; ++n) added[n] = load(values + n * kLanes);
    }
    QUIRE_UNROLL for (int n = 0; n < N; ++n) added[n] = added[n] * strength;
    for (int64_t i = 0; i < size; ++i) {
      const F32x16 key = broadcast(k[i]), query = broadcast(q[i]);
      QUIRE_UNROLL for (int n = 0; n < N; ++n) {
        float* at = state + n * vector + i * kLanes;
        const F32x16 now = fma(key, added[n], decay * load(at));
        store(at, now);
        out[n] = fma(now, query, out[n]);
      }
    }
    const F32x16 skip = broadcast(op.skip != nullptr ? op.skip[head] : 0.0f);
    QUIRE_UNROLL for (int n = 0; n < N; ++n) {
      store(results + n * kLanes, fma(skip, load(values + n * kLanes), out[n]));
    }
    memcpy(row<float>(op.out, token) + value_at, results, bytes);
  }
}

inline void pass_head(const RecurrenceOp& op, const Step& step, int64_t r, int64_t head, float* scratch) {
  const int64_t vectors = (op.value_size + kLanes - 1) / kLanes, vector = op.key_size * kLanes;
  std::byte* page = op.state + step.block_table(static_cast<int32_t>(op.group), r)[0] * op.state_stride;
  float* state = reinterpret_cast<float*>(page) + head * vectors * vector;
  if (step.starts[r] == 0) memset(state, 0, static_cast<size_t>(vectors * vector) * sizeof(float));
  for (int64_t at = 0; at < vectors; at += kStateVectors) {
    const int64_t first = at * kLanes, left = op.value_size - first;
    const int64_t count = left < kStateVectors * kLanes ? left : kStateVectors * kLanes;
    float* part = state + at * vector;
    switch ((count + kLanes - 1) / kLanes) {
      case 1:
        pass_tokens<1>(op, step, r, head, first, count, part, scratch);
        break;
      case 2:
        pass_tokens<2>(op, step, r, head, first, count, part, scratch);
        break;
      case 3:
        pass_tokens<3>(op, step, r, head, first, count, part, scratch);
        break;
      default:
        pass_tokens<4>(op, step, r, head, first, count, part, scratch);
    }
  }
}

// Work items are ordered by heads, so that each thread has a part of every request, long or short.
inline void recurrence(const RecurrenceOp& op, const Context& context) {
  const Step& step = *context.step;
  const Range mine = share(op.num_heads * step.num_requests, context);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    pass_head(op, step, item % step.num_requests, item / step.num_requests, reinterpret_cast<float*>(context.scratch));
  }
}

QUIRE_OP(recurrence, RecurrenceOp, q, k, v, gates, out, log_rates, time_bias, skip, state, state_stride, group,
         num_key_heads, num_heads, key_size, value_size, delta)

}  // namespace
}  // namespace quire
