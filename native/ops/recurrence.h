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
// A state is stored in groups of 64 columns as [key_size][64] of f32, so that it is read and written in one piece; the
// last group may be narrower, [key_size][16 N]. It is zero before the first token.
struct RecurrenceOp {
  Rows q;      // f32 [T, num_key_heads * key_size]
  Rows k;      // f32 [T, num_key_heads * key_size]
  Rows v;      // f32 [T, num_heads * value_size]
  Rows gates;  // f32 [T, num_heads], twice as wide with `delta`; null without time steps
  Rows out;    // f32 [T, num_heads * value_size]
  const float* log_rates;
  const float* time_bias;
  const float* skip;
  KvLayer kv;  // of which only the pages, block_stride_bytes apart, and the block tables matter: entry 0 is the page
  int64_t offset;  // bytes from the beginning of a page
  int64_t num_key_heads;
  int64_t num_heads;
  int64_t key_size;
  int64_t value_size;
  bool delta;
};

namespace {

constexpr int kStateVectors = 4;          // of columns that are computed together
constexpr int kTokensAtOnce = 4;          // that pass a value of the state while it is in a register
constexpr int64_t kStateTokens = kLanes;  // whose keys, queries and factors are prepared together

// log(1 + e^x) = max(x, 0) + log(1 + y) with y = e^-|x|, and log(1 + y) = 2 artanh(y / (2 + y)): with an argument of at
// most 1/3 its series of eight terms is exact to 2e-9.
inline F32x16 softplus(F32x16 x) {
  const F32x16 y = exp(zero() - abs(x)), z = y / (broadcast(2.0f) + y), square = z * z;
  F32x16 p = broadcast(1.0f / 15.0f);
  for (int n = 13; n >= 1; n -= 2) p = fma(p, square, broadcast(1.0f / static_cast<float>(n)));
  return select_less(x, zero(), zero(), x) + (z + z) * p;
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

// Up to kStateTokens tokens of a head: queries and keys as the state takes them, and the factors of what is in the
// state and of what is added.
struct Prepared {
  const float *q[kStateTokens], *k[kStateTokens];
  float decays[kStateTokens], strengths[kStateTokens];
};

// `scratch` has room for 2 * kStateTokens keys.
inline void prepare(const RecurrenceOp& op, int64_t first, int64_t count, int64_t head, float* scratch, Prepared& out) {
  const int64_t size = op.key_size, at = head / (op.num_heads / op.num_key_heads) * size;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(size));
  float steps[kLanes] = {}, gates[kLanes] = {};
  for (int64_t t = 0; t < count; ++t) {
    const float *q = row<float>(op.q, first + t) + at, *k = row<float>(op.k, first + t) + at;
    if (op.delta) {
      float* units = scratch + 2 * t * size;
      unit_vector(q, size, scale, units);
      unit_vector(k, size, 1.0f, units + size);
      q = units;
      k = units + size;
    }
    out.q[t] = q;
    out.k[t] = k;
    if (op.gates.data == nullptr) continue;
    const float* values = row<float>(op.gates, first + t);
    steps[t] = values[head];
    if (op.delta) gates[t] = values[op.num_heads + head];
  }
  const F32x16 one = broadcast(1.0f);
  F32x16 dt = one, decays = one;
  if (op.gates.data != nullptr) {
    dt = softplus(load(steps) + broadcast(op.time_bias != nullptr ? op.time_bias[head] : 0.0f));
  }
  if (op.log_rates != nullptr) decays = exp(zero() - exp(broadcast(op.log_rates[head])) * dt);
  store(out.decays, decays);
  store(out.strengths, op.delta ? one / (one + exp(zero() - load(gates))) : dt);
}

// One token: S = decay * S + k (x) added; out += S^T q, and with `kNext` of the next token known += S^T next.
template <int N, bool kNext>
[[gnu::always_inline]] inline void update(float* state, int64_t size, F32x16 decay, const float* k, const float* q,
                                          const float* next, const F32x16 (&added)[N], F32x16 (&out)[N],
                                          F32x16 (&known)[N]) {
  for (int64_t i = 0; i < size; ++i, state += N * kLanes) {
    const F32x16 key = broadcast(k[i]), query = broadcast(q[i]), following = broadcast(kNext ? next[i] : 0.0f);
    QUIRE_UNROLL for (int n = 0; n < N; ++n) {
      const F32x16 now = fma(key, added[n], decay * load(state + n * kLanes));
      store(state + n * kLanes, now);
      out[n] = fma(now, query, out[n]);
      if (kNext) known[n] = fma(now, following, known[n]);
    }
  }
}

// kTokens tokens without `delta`, from token t of the prepared ones on: what they add is known in advance, so each
// value of the state is loaded and stored once for all of them.
template <int N, int kTokens>
[[gnu::always_inline]] inline void update_all(float* state, int64_t size, const Prepared& tokens, int64_t t,
                                              const F32x16 (&added)[kTokens][N], F32x16 (&out)[kTokens][N]) {
  F32x16 decays[kTokens];
  QUIRE_UNROLL for (int j = 0; j < kTokens; ++j) decays[j] = broadcast(tokens.decays[t + j]);
  for (int64_t i = 0; i < size; ++i, state += N * kLanes) {
    F32x16 now[N];
    QUIRE_UNROLL for (int n = 0; n < N; ++n) now[n] = load(state + n * kLanes);
    QUIRE_UNROLL for (int j = 0; j < kTokens; ++j) {
      const F32x16 key = broadcast(tokens.k[t + j][i]), query = broadcast(tokens.q[t + j][i]);
      QUIRE_UNROLL for (int n = 0; n < N; ++n) {
        now[n] = fma(key, added[j][n], decays[j] * now[n]);
        out[j][n] = fma(now[n], query, out[j][n]);
      }
    }
    QUIRE_UNROLL for (int n = 0; n < N; ++n) store(state + n * kLanes, now[n]);
  }
}

// The values that a pass reads and writes: up to 16 N columns of a head from `column` on.
template <int N>
struct Columns {
  const RecurrenceOp& op;
  int64_t first, at;
  size_t bytes;
  F32x16 skip;

  void load_values(int64_t t, F32x16 (&to)[N]) const {
    float values[N * kLanes] = {};
    memcpy(values, row<float>(op.v, first + t) + at, bytes);
    QUIRE_UNROLL for (int n = 0; n < N; ++n) to[n] = load(values + n * kLanes);
  }
  void write(int64_t t, const F32x16 (&out)[N]) const {
    F32x16 values[N];
    load_values(t, values);
    float results[N * kLanes];
    QUIRE_UNROLL for (int n = 0; n < N; ++n) store(results + n * kLanes, fma(skip, values[n], out[n]));
    memcpy(row<float>(op.out, first + t) + at, results, bytes);
  }
};

template <int N, int kTokens>
[[gnu::always_inline]] inline void pass_some(const Columns<N>& columns, const Prepared& tokens, int64_t t,
                                             float* state) {
  F32x16 added[kTokens][N], out[kTokens][N];
  QUIRE_UNROLL for (int j = 0; j < kTokens; ++j) {
    columns.load_values(t + j, added[j]);
    const F32x16 strength = broadcast(tokens.strengths[t + j]);
    QUIRE_UNROLL for (int n = 0; n < N; ++n) {
      added[j][n] = added[j][n] * strength;
      out[j][n] = zero();
    }
  }
  update_all<N, kTokens>(state, columns.op.key_size, tokens, t, added, out);
  QUIRE_UNROLL for (int j = 0; j < kTokens; ++j) columns.write(t + j, out[j]);
}

// Prepared tokens through `width` (at most 16 N) columns of a head's state from column `column` on. With `delta` a
// token adds what depends on the state before it, and the pass that writes a token into the state already reads it with
// the next token's key: one pass per token. Each value takes the same operations in the same order in all of these
// passes.
template <int N>
inline void pass_tokens(const RecurrenceOp& op, const Prepared& tokens, int64_t first, int64_t count, int64_t head,
                        int64_t column, int64_t width, float* state) {
  const int64_t size = op.key_size;
  const Columns<N> columns{op, first, head * op.value_size + column, static_cast<size_t>(width) * sizeof(float),
                           broadcast(op.skip != nullptr ? op.skip[head] : 0.0f)};
  int64_t t = 0;
  if (!op.delta) {
    for (; t + kTokensAtOnce <= count; t += kTokensAtOnce) pass_some<N, kTokensAtOnce>(columns, tokens, t, state);
    for (; t < count; ++t) pass_some<N, 1>(columns, tokens, t, state);
    return;
  }
  F32x16 known[N];
  QUIRE_UNROLL for (int n = 0; n < N; ++n) known[n] = zero();
  for (int64_t i = 0; i < size; ++i) {
    const F32x16 key = broadcast(tokens.k[0][i]);
    QUIRE_UNROLL for (int n = 0; n < N; ++n) known[n] = fma(load(state + (i * N + n) * kLanes), key, known[n]);
  }
  for (; t < count; ++t) {
    const F32x16 decay = broadcast(tokens.decays[t]), strength = broadcast(tokens.strengths[t]);
    F32x16 added[N], out[N];
    columns.load_values(t, added);
    QUIRE_UNROLL for (int n = 0; n < N; ++n) {
      added[n] = (added[n] - decay * known[n]) * strength;
      out[n] = zero();
      known[n] = zero();
    }
    if (t + 1 < count) {
      update<N, true>(state, size, decay, tokens.k[t], tokens.q[t], tokens.k[t + 1], added, out, known);
    } else {
      update<N, false>(state, size, decay, tokens.k[t], tokens.q[t], nullptr, added, out, known);
    }
    columns.write(t, out);
  }
}

inline void pass_head(const RecurrenceOp& op, const Step& step, int64_t r, int64_t head, float* scratch) {
  const int64_t vectors = (op.value_size + kLanes - 1) / kLanes, vector = op.key_size * kLanes;
  std::byte* page = op.kv.base + step.block_table(op.kv.group, r)[0] * op.kv.block_stride_bytes + op.offset;
  float* state = reinterpret_cast<float*>(page) + head * vectors * vector;
  if (step.starts[r] == 0) memset(state, 0, static_cast<size_t>(vectors * vector) * sizeof(float));
  const int64_t end = step.first_tokens[r + 1];
  for (int64_t first = step.first_tokens[r]; first < end; first += kStateTokens) {
    const int64_t count = end - first < kStateTokens ? end - first : kStateTokens;
    Prepared tokens;
    prepare(op, first, count, head, scratch, tokens);
    for (int64_t at = 0; at < vectors; at += kStateVectors) {
      const int64_t column = at * kLanes, left = op.value_size - column;
      const int64_t width = left < kStateVectors * kLanes ? left : kStateVectors * kLanes;
      float* part = state + at * vector;
      switch ((width + kLanes - 1) / kLanes) {
        case 1:
          pass_tokens<1>(op, tokens, first, count, head, column, width, part);
          break;
        case 2:
          pass_tokens<2>(op, tokens, first, count, head, column, width, part);
          break;
        case 3:
          pass_tokens<3>(op, tokens, first, count, head, column, width, part);
          break;
        default:
          pass_tokens<4>(op, tokens, first, count, head, column, width, part);
      }
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

QUIRE_OP(recurrence, RecurrenceOp, q, k, v, gates, out, log_rates, time_bias, skip, kv, offset, num_key_heads,
         num_heads, key_size, value_size, delta)

}  // namespace
}  // namespace quire
