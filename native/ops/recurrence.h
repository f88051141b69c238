// Linear recurrences: a matrix per head that every token decays, adds to and reads. Gated delta rule (Yang 2024), Mamba
// 2's state space (Dao & Gu 2024) and plain linear attention (Katharopoulos 2020).
//
// Computed in chunks of kChunkTokens positions (ibid., sec. 6; Yang 2024, sec. 3.3), whose grid is that of a request's
// positions: the state is that of the chunk's beginning, and what later tokens of the chunk added stays beside it until
// the chunk is full. A token's result is the same sum whether the step computes it alone, as a decode, or with others,
// so that results do not depend on how a prompt is cut. Beside one token after another a state's value takes two
// operations per token and not three (four with `delta`), and a decode writes it once per chunk.
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
// With D = key_size and V = value_size, each rounded up to 16 floats, a state is, in f32:
//   matrices  [num_heads]: those before the chunk, zero before the first token, in groups of 32 columns as
//             [key_size][32], so that one is read and written in one piece; the last may be [key_size][16]
//   added     [num_heads, kChunkTokens, V]: u of the chunk's tokens
//   factors   [num_heads, 16]: after the last token, per token j of the chunk the decay of all after it, then (in lane
//             kChunkTokens) that of all
//   keys      [num_key_heads, kChunkTokens, D]
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

constexpr int kStateVectors = 2;  // of columns that are computed together: 16 KB of 128 keys, which stay in L1
#if defined(__AVX512F__)
constexpr int kStateRows = 8;  // that share a value while it is in a register
#else
constexpr int kStateRows = 2;
#endif
constexpr int64_t kChunkTokens = 8;      // fewer than kLanes; kernels/recurrence.py has the same
constexpr int64_t kPreparedTokens = 64;  // whose keys, queries and products of both all heads of a key head share

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

inline int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

// The parts of a request's state (see RecurrenceOp).
struct State {
  float *matrices, *added, *factors, *keys;
  int64_t key_stride, value_stride, matrix_size;  // in floats

  State(const RecurrenceOp& op, const Step& step, int64_t request)
      : key_stride(padded(op.key_size)), value_stride(padded(op.value_size)), matrix_size(op.key_size * value_stride) {
    std::byte* page = op.kv.base + step.block_table(op.kv.group, request)[0] * op.kv.block_stride_bytes + op.offset;
    matrices = reinterpret_cast<float*>(page);
    added = matrices + op.num_heads * matrix_size;
    factors = added + op.num_heads * kChunkTokens * value_stride;
    keys = factors + op.num_heads * kLanes;
  }
};

// Positions begin … end - 1 of a request, in or behind the chunk that begins at `base`; row i of all arrays is position
// base + i. They are `first_token` … of the step.
struct Prepared {
  int64_t base, begin, end, first_token, stride;
  float *queries, *keys;  // [end - base, stride]; in keys also those before `begin`
  float* scores;          // [end - base, 16]: of a token's query with the chunk's keys up to its own, then (in lane
                          // kChunkTokens) 1
  float* overlaps;        // the same of its key with the keys before, with `delta`
  int64_t row_of(int64_t position) const { return position - base; }
  int64_t token_of(int64_t position) const { return first_token + position - begin; }
};

// A query or a key as the state takes it, with zeros up to a whole vector.
inline void prepare_vector(const RecurrenceOp& op, const float* x, float scale, float* out) {
  if (op.delta) {
    unit_vector(x, op.key_size, scale, out);
  } else {
    memcpy(out, x, static_cast<size_t>(op.key_size) * sizeof(float));
  }
  for (int64_t i = op.key_size; i < padded(op.key_size); ++i) out[i] = 0.0f;
}

inline void prepare_key(const RecurrenceOp& op, int64_t token, int64_t key_head, float* out) {
  prepare_vector(op, row<float>(op.k, token) + key_head * op.key_size, 1.0f, out);
}

// Products of x with `count` keys, and in lane kChunkTokens 1.
inline void multiply_keys(const float* x, const float* keys, int64_t stride, int64_t count, float* out) {
  for (int64_t j = 0; j < count; ++j) {
    F32x16 total = zero();
    for (int64_t i = 0; i < stride; i += kLanes) total = fma(load(x + i), load(keys + j * stride + i), total);
    out[j] = sum(total);
  }
  for (int64_t j = count; j < kLanes; ++j) out[j] = j == kChunkTokens ? 1.0f : 0.0f;
}

inline void prepare(const RecurrenceOp& op, const State& state, int64_t key_head, const Prepared& to) {
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(op.key_size));
  const float* before = state.keys + key_head * kChunkTokens * to.stride;
  memcpy(to.keys, before, static_cast<size_t>((to.begin - to.base) * to.stride) * sizeof(float));
  for (int64_t p = to.begin; p < to.end; ++p) {
    const int64_t i = to.row_of(p), slot = p % kChunkTokens, token = to.token_of(p);
    float *query = to.queries + i * to.stride, *key = to.keys + i * to.stride;
    prepare_vector(op, row<float>(op.q, token) + key_head * op.key_size, scale, query);
    prepare_key(op, token, key_head, key);
    const float* chunk = key - slot * to.stride;
    multiply_keys(query, chunk, to.stride, slot + 1, to.scores + i * kLanes);
    if (op.delta) multiply_keys(key, chunk, to.stride, slot, to.overlaps + i * kLanes);
  }
}

// Of one head, in the rows of a Prepared: a token's weights of the chunk's `added` in its result, of those before in
// what the state knows of its key, both with the weight of the matrix in lane kChunkTokens, and in `factors` those of
// the state after the token.
struct HeadFactors {
  float factors[kPreparedTokens][kLanes], scores[kPreparedTokens][kLanes], overlaps[kPreparedTokens][kLanes];
  float strengths[kPreparedTokens];
};

// decays and strengths of up to 16 tokens
inline void prepare_gates(const RecurrenceOp& op, int64_t first, int64_t count, int64_t head, float* decays,
                          float* strengths) {
  float steps[kLanes] = {}, gates[kLanes] = {};
  for (int64_t t = 0; t < count && op.gates.data != nullptr; ++t) {
    const float* values = row<float>(op.gates, first + t);
    steps[t] = values[head];
    if (op.delta) gates[t] = values[op.num_heads + head];
  }
  const F32x16 one = broadcast(1.0f);
  F32x16 dt = one, decay = one;
  if (op.gates.data != nullptr) {
    dt = softplus(load(steps) + broadcast(op.time_bias != nullptr ? op.time_bias[head] : 0.0f));
  }
  if (op.log_rates != nullptr) decay = exp(zero() - exp(broadcast(op.log_rates[head])) * dt);
  store(decays, decay);
  store(strengths, op.delta ? one / (one + exp(zero() - load(gates))) : dt);
}

inline F32x16 one_in_lane(int64_t lane) {
  float lanes[2 * kLanes] = {};
  lanes[kLanes] = 1.0f;
  return load(lanes + kLanes - lane);
}

inline void prepare_head(const RecurrenceOp& op, const State& state, const Prepared& tokens, int64_t head,
                         HeadFactors& out) {
  F32x16 units[kChunkTokens];
  for (int64_t slot = 0; slot < kChunkTokens; ++slot) units[slot] = one_in_lane(slot);
  F32x16 now = load(state.factors + head * kLanes);
  float decays[kLanes], strengths[kLanes];
  for (int64_t p = tokens.begin; p < tokens.end; ++p) {
    const int64_t i = tokens.row_of(p), slot = p % kChunkTokens, lane = (p - tokens.begin) % kLanes;
    if (lane == 0) {
      const int64_t left = tokens.end - p;
      prepare_gates(op, tokens.token_of(p), left < kLanes ? left : kLanes, head, decays, strengths);
    }
    if (slot == 0) now = one_in_lane(kChunkTokens);
    now = fma(now, broadcast(decays[lane]), units[slot]);
    store(out.factors[i], now);
    store(out.scores[i], now * load(tokens.scores + i * kLanes));
    if (op.delta) store(out.overlaps[i], now * load(tokens.overlaps + i * kLanes));
    out.strengths[i] = strengths[lane];
  }
  store(state.factors + head * kLanes, now);
}

// out[r] = x[r] @ S of kRows rows, `stride` apart, for 16 N columns of S.
template <int N, int kRows>
[[gnu::always_inline]] inline void read_rows(const float* matrix, int64_t size, const float* x, int64_t stride,
                                             float* out) {
  F32x16 sums[kRows][N];
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) { QUIRE_UNROLL for (int n = 0; n < N; ++n) sums[r][n] = zero(); }
  for (int64_t i = 0; i < size; ++i, matrix += N * kLanes) {
    F32x16 values[N];
    QUIRE_UNROLL for (int n = 0; n < N; ++n) values[n] = load(matrix + n * kLanes);
    QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
      const F32x16 factor = broadcast(x[r * stride + i]);
      QUIRE_UNROLL for (int n = 0; n < N; ++n) sums[r][n] = fma(values[n], factor, sums[r][n]);
    }
  }
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    QUIRE_UNROLL for (int n = 0; n < N; ++n) store(out + (r * N + n) * kLanes, sums[r][n]);
  }
}

template <int N>
inline void read_matrix(const float* matrix, int64_t size, const float* x, int64_t stride, int64_t count, float* out) {
  int64_t r = 0;
  for (; r + kStateRows <= count; r += kStateRows) {
    read_rows<N, kStateRows>(matrix, size, x + r * stride, stride, out + r * N * kLanes);
  }
  for (; r < count; ++r) read_rows<N, 1>(matrix, size, x + r * stride, stride, out + r * N * kLanes);
}

// S = decay * S + the sum over the chunk's tokens j of keys[j] (x) added[j], for kRows rows of S.
template <int N, int kRows>
[[gnu::always_inline]] inline void write_rows(float* matrix, F32x16 decay, const float* keys, int64_t stride,
                                              const float* added) {
  F32x16 now[kRows][N];
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    QUIRE_UNROLL for (int n = 0; n < N; ++n) now[r][n] = decay * load(matrix + (r * N + n) * kLanes);
  }
  for (int64_t j = 0; j < kChunkTokens; ++j, keys += stride, added += N * kLanes) {
    F32x16 values[N];
    QUIRE_UNROLL for (int n = 0; n < N; ++n) values[n] = load(added + n * kLanes);
    QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
      const F32x16 key = broadcast(keys[r]);
      QUIRE_UNROLL for (int n = 0; n < N; ++n) now[r][n] = fma(key, values[n], now[r][n]);
    }
  }
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    QUIRE_UNROLL for (int n = 0; n < N; ++n) store(matrix + (r * N + n) * kLanes, now[r][n]);
  }
}

// Up to 16 N columns of a head: where they are in the rows of the step and in the state.
template <int N>
struct Columns {
  const RecurrenceOp& op;
  int64_t at;  // of v and out
  size_t bytes;
  F32x16 skip;
  float *matrix, *added;
  int64_t added_stride;

  bool is_whole() const { return bytes == N * kLanes * sizeof(float); }
  void load_values(int64_t token, F32x16 (&to)[N]) const {
    const float* from = row<float>(op.v, token) + at;
    float values[N * kLanes];
    if (!is_whole()) {
      memset(values, 0, sizeof values);
      memcpy(values, from, bytes);
      from = values;
    }
    QUIRE_UNROLL for (int n = 0; n < N; ++n) to[n] = load(from + n * kLanes);
  }
  void write(int64_t token, const F32x16 (&out)[N]) const {
    F32x16 values[N];
    load_values(token, values);
    float results[N * kLanes], *to = row<float>(op.out, token) + at;
    float* whole = is_whole() ? to : results;
    QUIRE_UNROLL for (int n = 0; n < N; ++n) store(whole + n * kLanes, fma(skip, values[n], out[n]));
    if (!is_whole()) memcpy(to, results, bytes);
  }
  void fetch(int64_t token) const {
    QUIRE_UNROLL for (int n = 0; n < N; ++n) {
      prefetch_l1(row<float>(op.v, token) + at + n * kLanes);
      prefetch_to_write(row<float>(op.out, token) + at + n * kLanes);
    }
  }
  // factors[kChunkTokens] * found + the sum over `count` tokens j of the chunk of factors[j] * added[j]
  void combine(const float* found, const float* factors, int64_t count, F32x16 (&to)[N]) const {
    QUIRE_UNROLL for (int n = 0; n < N; ++n) to[n] = broadcast(factors[kChunkTokens]) * load(found + n * kLanes);
    for (int64_t j = 0; j < count; ++j) {
      const F32x16 factor = broadcast(factors[j]);
      QUIRE_UNROLL for (int n = 0; n < N; ++n) {
        to[n] = fma(factor, load(added + j * added_stride + n * kLanes), to[n]);
      }
    }
  }
};

// Positions first … first + count - 1, of one chunk.
template <int N>
inline void pass_chunk(const Columns<N>& columns, const Prepared& tokens, const HeadFactors& head, int64_t first,
                       int64_t count) {
  const RecurrenceOp& op = columns.op;
  const int64_t slot = first % kChunkTokens, at = tokens.row_of(first), token = tokens.token_of(first);
  float found[kChunkTokens][N * kLanes], known[kChunkTokens][N * kLanes];
  if (op.delta) {
    read_matrix<N>(columns.matrix, op.key_size, tokens.keys + at * tokens.stride, tokens.stride, count, known[0]);
  }
  read_matrix<N>(columns.matrix, op.key_size, tokens.queries + at * tokens.stride, tokens.stride, count, found[0]);
  for (int64_t t = 0; t < count; ++t) {
    F32x16 values[N];
    columns.load_values(token + t, values);
    if (op.delta) {
      F32x16 already[N];
      columns.combine(known[t], head.overlaps[at + t], slot + t, already);
      QUIRE_UNROLL for (int n = 0; n < N; ++n) values[n] = values[n] - already[n];
    }
    const F32x16 strength = broadcast(head.strengths[at + t]);
    float* added = columns.added + (slot + t) * columns.added_stride;
    QUIRE_UNROLL for (int n = 0; n < N; ++n) store(added + n * kLanes, values[n] * strength);
  }
  for (int64_t t = 0; t < count; ++t) {
    F32x16 out[N];
    columns.combine(found[t], head.scores[at + t], slot + t + 1, out);
    columns.write(token + t, out);
  }
  if (slot + count < kChunkTokens) return;
  const float* factors = head.factors[at + count - 1];
  for (int64_t j = 0; j < kChunkTokens; ++j) {
    QUIRE_UNROLL for (int n = 0; n < N; ++n) {
      store(found[j] + n * kLanes, broadcast(factors[j]) * load(columns.added + j * columns.added_stride + n * kLanes));
    }
  }
  const float* keys = tokens.keys + (at - slot) * tokens.stride;
  const F32x16 decay = broadcast(factors[kChunkTokens]);
  float* matrix = columns.matrix;
  int64_t i = 0;
  for (; i + kStateRows <= op.key_size; i += kStateRows, matrix += kStateRows * N * kLanes) {
    write_rows<N, kStateRows>(matrix, decay, keys + i, tokens.stride, found[0]);
  }
  for (; i < op.key_size; ++i, matrix += N * kLanes) write_rows<N, 1>(matrix, decay, keys + i, tokens.stride, found[0]);
}

// Calls visit(first, count) for the parts of consecutive chunks.
template <typename Visit>
inline void visit_chunks(int64_t begin, int64_t end, Visit visit) {
  for (int64_t first = begin; first < end;) {
    const int64_t next = first - first % kChunkTokens + kChunkTokens, last = next < end ? next : end;
    visit(first, last - first);
    first = last;
  }
}

template <int N>
inline void pass_columns(const RecurrenceOp& op, const State& state, const Prepared& tokens, const HeadFactors& factors,
                         int64_t head, int64_t column, int64_t width) {
  const Columns<N> columns{op,
                           head * op.value_size + column,
                           static_cast<size_t>(width) * sizeof(float),
                           broadcast(op.skip != nullptr ? op.skip[head] : 0.0f),
                           state.matrices + head * state.matrix_size + column * op.key_size,
                           state.added + head * kChunkTokens * state.value_stride + column,
                           state.value_stride};
  visit_chunks(tokens.begin, tokens.end, [&](int64_t first, int64_t count) {
    // What the next chunk reads and writes lies far apart.
    const int64_t next = first + count, end = next + kChunkTokens < tokens.end ? next + kChunkTokens : tokens.end;
    for (int64_t p = next; p < end; ++p) columns.fetch(tokens.token_of(p));
    pass_chunk<N>(columns, tokens, factors, first, count);
  });
}

inline void pass_head(const RecurrenceOp& op, const State& state, const Prepared& tokens, int64_t head) {
  HeadFactors factors;
  prepare_head(op, state, tokens, head, factors);
  for (int64_t column = 0; column < op.value_size; column += kStateVectors * kLanes) {
    const int64_t left = op.value_size - column;
    const int64_t width = left < kStateVectors * kLanes ? left : kStateVectors * kLanes;
    if (width <= kLanes) {
      pass_columns<1>(op, state, tokens, factors, head, column, width);
    } else {
      pass_columns<kStateVectors>(op, state, tokens, factors, head, column, width);
    }
  }
}

// Heads begin … end - 1 of a request.
inline void pass_request(const RecurrenceOp& op, const Step& step, int64_t r, Range heads, float* scratch) {
  const State state(op, step, r);
  const int64_t start = step.starts[r], end = start + step.counts[r], stride = state.key_stride;
  const int64_t per_key = op.num_heads / op.num_key_heads;
  if (start == 0) {
    memset(state.matrices + heads.begin * state.matrix_size, 0,
           static_cast<size_t>((heads.end - heads.begin) * state.matrix_size) * sizeof(float));
  }
  // Long keys fill the scratch with fewer tokens, at least a chunk.
  const int64_t fitting = kScratchBytes / static_cast<int64_t>(sizeof(float)) / (2 * (stride + kLanes));
  const int64_t most = fitting < kPreparedTokens ? fitting / kChunkTokens * kChunkTokens : kPreparedTokens;
  for (int64_t begin = start; begin < end;) {
    Prepared tokens;
    tokens.base = begin - begin % kChunkTokens;
    tokens.begin = begin;
    tokens.end = tokens.base + most < end ? tokens.base + most : end;
    tokens.first_token = step.first_tokens[r] + begin - start;
    tokens.stride = stride;
    tokens.queries = scratch;
    tokens.keys = tokens.queries + most * stride;
    tokens.scores = tokens.keys + most * stride;
    tokens.overlaps = tokens.scores + most * kLanes;
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      if (head == heads.begin || head % per_key == 0) prepare(op, state, head / per_key, tokens);
      pass_head(op, state, tokens, head);
    }
    begin = tokens.end;
  }
}

// Keys of a request's last chunk, if that is not full.
inline void keep_keys(const RecurrenceOp& op, const Step& step, int64_t r, int64_t key_head) {
  const State state(op, step, r);
  const int64_t start = step.starts[r], end = start + step.counts[r], chunk = end - end % kChunkTokens;
  for (int64_t p = chunk > start ? chunk : start; p < end; ++p) {
    float* key = state.keys + (key_head * kChunkTokens + p % kChunkTokens) * state.key_stride;
    prepare_key(op, step.first_tokens[r] + p - start, key_head, key);
  }
}

// Work items are ordered by heads, so that each thread has a part of every request, long or short.
inline void recurrence(const RecurrenceOp& op, const Context& context) {
  const Step& step = *context.step;
  const Range mine = share(op.num_heads * step.num_requests, context);
  bool replaces_keys = false;
  for (int64_t r = 0; r < step.num_requests; ++r) {
    // The first head h with mine.begin <= h * num_requests + r, and that of mine.end.
    const auto head_at = [&](int64_t item) { return (item - r + step.num_requests - 1) / step.num_requests; };
    const Range heads = {head_at(mine.begin), head_at(mine.end)};
    if (heads.begin < heads.end) {
      pass_request(op, step, r, heads, reinterpret_cast<float*>(context.scratch));
    }
    const int64_t start = step.starts[r], end = start + step.counts[r];
    replaces_keys |= start % kChunkTokens > 0 && end % kChunkTokens > 0 && end / kChunkTokens > start / kChunkTokens;
  }
  // Other threads may still read the keys of an earlier chunk.
  if (replaces_keys) wait_for_all(*context.barrier);
  const Range kept = share(op.num_key_heads * step.num_requests, context);
  for (int64_t item = kept.begin; item < kept.end; ++item) {
    keep_keys(op, step, item % step.num_requests, item / step.num_requests);
  }
}

QUIRE_OP(recurrence, RecurrenceOp, q, k, v, gates, out, log_rates, time_bias, skip, kv, offset, num_key_heads,
         num_heads, key_size, value_size, delta)

}  // namespace
}  // namespace quire
