// The parameters of every op. An op is a function `void op(const SomeOp&, const Context&)` which computes its thread's
// share; what one op writes, another may read only after the barrier between them. An op's result for one token must
// not depend on the other tokens of the step, nor on the number of threads.
#pragma once
#include "plan/types.h"

namespace quire {

// out[t] = table[id[t] + offset], or += ; ids are the step's token ids or its positions.
struct EmbedOp {
  Weight table;
  Rows out;  // f32
  int64_t offset;
  bool of_positions;
  bool add;
};

// Angles of the step's positions: cos, sin [T, half], each position in fp32 times frequencies[half].
struct RotaryOp {
  const float* frequencies;
  float* cos;
  float* sin;
  int64_t half;
};

// Layer norm if subtract_mean, else RMS norm, with 0 for the mean: out = (x - mean) * rsqrt(mean of (x - mean)^2 +
// epsilon) * weight + bias. A null weight is 1, a null bias 0.
struct NormOp {
  Rows in;   // f32
  Rows out;  // any type
  const float* weight;
  const float* bias;
  int64_t width;
  float epsilon;
  bool subtract_mean;
};

enum class Activation : int32_t { none, relu, gelu, gelu_tanh, silu };

// A part of the keys and values that the next attention reads first: from share `begin` to share `end`, which
// are from 0 to 1.
struct KvAhead {
  KvLayer kv;
  int64_t window;  // as in AttendOp
  double begin, end;
};

// y = x @ weight.T + bias, then `activation`. gated: N = 2 F, out[t, f] = activation(y[t, f]) * y[t, F + f], F being
// a multiple of 16.
// add: out[t, n] += y (f32 rows). Rows x are as the weight's format wants; rows out may be of any type, q8 wanting
// a multiple of 32 columns. What `ahead` says may be fetched meanwhile.
struct GemmOp {
  Weight weight;
  const float* bias;  // [N] or null
  Rows x;
  Rows out;
  Activation activation;
  bool gated;
  bool add;
  bool of_logit_rows;  // S rows instead of T
  KvAhead ahead;
};

// Queries and keys of each token normalised per head (if norms are given) and rotated in place (if cos is given), by
// pairs (i, i + D / 2); then keys and values written to the token's slot of the pool.
struct WriteKvOp {
  float* q;  // [T, H, D], f32, rows stride elements apart; null: nothing to do for queries
  float* k;  // [T, K, D]
  float* v;  // [T, K, D]
  int64_t stride;
  int32_t num_heads;
  const float* q_norm;  // [D] or null
  const float* k_norm;
  float epsilon;
  const float* cos;  // [T, D / 2] or null
  const float* sin;
  KvLayer kv;
};

// Attention of each token to positions max(0, p - window + 1) … p of its request; window 0: all. The queries' memory
// may be overwritten. scale > 0.
struct AttendOp {
  float* q;  // as above
  int64_t stride;
  Rows out;  // [T, H * D], any type
  int32_t num_heads;
  int64_t window;
  float scale;
  KvLayer kv;
};

// out = activation(in), or activation(in[:F]) * in[F:] if gated; `none` just changes the type. width: of out.
struct ActivateOp {
  Rows in;  // f32
  Rows out;
  int64_t width;
  Activation activation;
  bool gated;
  bool of_logit_rows;    // S rows instead of T
  bool from_logit_rows;  // row s of out is row logit_rows[s] of in
};

// out = a + b, f32.
struct AddOp {
  Rows a;
  Rows b;
  Rows out;
  int64_t width;
};

// The largest logit of each of the S rows without writing logits: per thread, then merged by `ArgmaxOp`. A row without
// a largest finite value (NaN, +inf, all -inf) gets id -1; of equal values the lowest id wins.
struct HeadOp {
  Weight weight;
  const float* bias;
  Rows x;
  float* best_values;  // [threads, max rows]
  int32_t* best_ids;
  int64_t max_rows;
};
struct ArgmaxOp {
  const float* best_values;
  const int32_t* best_ids;
  int64_t max_rows;
  int32_t* token_ids;  // [S]
};

// clang-format off
#define QUIRE_OPS(X)                                                                                       \
  X(embed, EmbedOp) X(rotary, RotaryOp) X(norm, NormOp) X(gemm, GemmOp) X(write_kv, WriteKvOp)             \
  X(attend, AttendOp) X(activate, ActivateOp) X(add, AddOp) X(head, HeadOp) X(argmax, ArgmaxOp)
// clang-format on

}  // namespace quire
