// Attention of fp32 rows to a tile of fp32 keys and values, with an online softmax (Milakov & Gimelshein 2018).
//
// Tiles begin at fixed positions and are taken in order, a score is summed over 16 lanes and a fixed tree, and a
// weighted sum runs over a tile's tokens in order: a row's bits depend on nothing else.
#pragma once
#include "ops/functions.h"

namespace quire {
namespace {

constexpr int64_t kLatentTile = 64;  // positions of a tile: with 576 values each 147 KB, which stay in L2
constexpr int64_t kLatentRows = 32;  // rows that go through a tile together
constexpr float kNoScore = -1e30f;

#if defined(__AVX512F__)
constexpr int kDotRows = 4, kDotTokens = 4, kSumRows = 4, kSumVectors = 4;
#elif defined(__AVX2__)
constexpr int kDotRows = 3, kDotTokens = 4, kSumRows = 3, kSumVectors = 2;
#elif defined(QUIRE_NEON)
constexpr int kDotRows = 4, kDotTokens = 4, kSumRows = 3, kSumVectors = 2;
#else
constexpr int kDotRows = 1, kDotTokens = 1, kSumRows = 1, kSumVectors = 1;
#endif

// Rows of floats, `stride` elements apart.
template <typename T>
struct Matrix {
  T* data;
  int64_t stride;
  T* row(int64_t index) const { return data + index * stride; }
};

// Lanes that `dot_block` sums at once: with all of them the registers of AVX2 hold sums of four products, with half of
// them twelve, which load half as much for each. With a quarter those of NEON hold 16.
#if defined(__AVX2__) && !defined(__AVX512F__)
using DotLanes = __m256;
inline DotLanes load_dot_lanes(const float* p) { return _mm256_loadu_ps(p); }
inline DotLanes fma(DotLanes a, DotLanes b, DotLanes c) { return _mm256_fmadd_ps(a, b, c); }
#elif defined(QUIRE_NEON)
using DotLanes = float32x4_t;
inline DotLanes load_dot_lanes(const float* p) { return vld1q_f32(p); }
inline DotLanes fma(DotLanes a, DotLanes b, DotLanes c) { return vfmaq_f32(c, a, b); }
#else
using DotLanes = F32x16;
inline DotLanes load_dot_lanes(const float* p) { return load(p); }
#endif

template <int kRows, int kTokens>
void dot_block(Matrix<const float> q, Matrix<const float> k, int64_t width, Matrix<float> out) {
  constexpr int kParts = sizeof(F32x16) / sizeof(DotLanes);
  F32x16 sums[kRows * kTokens];
  QUIRE_UNROLL for (int part = 0; part < kParts; ++part) {
    DotLanes now[kRows][kTokens] = {};
    for (int64_t i = part * (kLanes / kParts); i < width; i += kLanes) {
      DotLanes queries[kRows];
      QUIRE_UNROLL for (int r = 0; r < kRows; ++r) queries[r] = load_dot_lanes(q.row(r) + i);
      QUIRE_UNROLL for (int t = 0; t < kTokens; ++t) {
        const DotLanes key = load_dot_lanes(k.row(t) + i);
        QUIRE_UNROLL for (int r = 0; r < kRows; ++r) now[r][t] = fma(queries[r], key, now[r][t]);
      }
    }
    QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
      QUIRE_UNROLL for (int t = 0; t < kTokens; ++t) {
        memcpy(reinterpret_cast<DotLanes*>(&sums[r * kTokens + t]) + part, &now[r][t], sizeof(DotLanes));
      }
    }
  }
  float results[kRows * kTokens];
  sum_each(sums, results);
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) memcpy(out.row(r), results + r * kTokens, kTokens * sizeof(float));
}

// out[r][t] = q[r] · k[t] for all of a tile's tokens up to num_tokens, and up to three after them. Widths are whole
// vectors.
inline void dots(Matrix<const float> q, int64_t num_rows, Matrix<const float> k, int64_t num_tokens, int64_t width,
                 Matrix<float> out) {
  for (int64_t t = 0; t < num_tokens; t += kDotTokens) {
    const Matrix<const float> keys{k.row(t), k.stride};
    int64_t r = 0;
    for (; r + kDotRows <= num_rows; r += kDotRows) {
      dot_block<kDotRows, kDotTokens>({q.row(r), q.stride}, keys, width, {out.row(r) + t, out.stride});
    }
    for (; r < num_rows; ++r) {
      dot_block<1, kDotTokens>({q.row(r), q.stride}, keys, width, {out.row(r) + t, out.stride});
    }
  }
}

template <int kRows, int kVectors>
void sum_block(Matrix<const float> p, Matrix<const float> v, int64_t count, Matrix<float> out) {
  F32x16 sums[kRows][kVectors];
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    QUIRE_UNROLL for (int i = 0; i < kVectors; ++i) sums[r][i] = load(out.row(r) + i * kLanes);
  }
  for (int64_t t = 0; t < count; ++t) {
    F32x16 weights[kRows];
    QUIRE_UNROLL for (int r = 0; r < kRows; ++r) weights[r] = broadcast(p.row(r)[t]);
    QUIRE_UNROLL for (int i = 0; i < kVectors; ++i) {
      const F32x16 value = load(v.row(t) + i * kLanes);
      QUIRE_UNROLL for (int r = 0; r < kRows; ++r) sums[r][i] = fma(weights[r], value, sums[r][i]);
    }
  }
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    QUIRE_UNROLL for (int i = 0; i < kVectors; ++i) store(out.row(r) + i * kLanes, sums[r][i]);
  }
}

template <int kVectors>
void sum_columns(Matrix<const float> p, int64_t num_rows, Matrix<const float> v, int64_t count, Matrix<float> out) {
  int64_t r = 0;
  for (; r + kSumRows <= num_rows; r += kSumRows) {
    sum_block<kSumRows, kVectors>({p.row(r), p.stride}, v, count, {out.row(r), out.stride});
  }
  for (; r < num_rows; ++r) sum_block<1, kVectors>({p.row(r), p.stride}, v, count, {out.row(r), out.stride});
}

// out[r] += the sum over t < count, in order, of p[r][t] * v[t]. The width is whole vectors.
inline void add_weighted(Matrix<const float> p, int64_t num_rows, Matrix<const float> v, int64_t count, int64_t width,
                         Matrix<float> out) {
  int64_t i = 0;
  for (; i + kSumVectors * kLanes <= width; i += kSumVectors * kLanes) {
    sum_columns<kSumVectors>(p, num_rows, {v.row(0) + i, v.stride}, count, {out.row(0) + i, out.stride});
  }
  for (; i < width; i += kLanes) {
    sum_columns<1>(p, num_rows, {v.row(0) + i, v.stride}, count, {out.row(0) + i, out.stride});
  }
}

// A row's softmax so far: its highest score, the sums of weights by lane, and from kStateHead on the weighted values.
constexpr int64_t kStateHead = 2 * kLanes;

inline void begin_state(float* state, int64_t value_width) {
  memset(state, 0, static_cast<size_t>(kStateHead + value_width) * sizeof(float));
  state[0] = kNoScore;
}

// Scores of a row's first `visible` tokens of a tile, times `scale`, which includes log2(e), to weights; those of the
// others to 0. The sums so far are brought to the new highest score.
inline void soften_row(float* scores, int64_t visible, float scale, float* state, int64_t value_width) {
  static constexpr float kIota[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  constexpr int kVectors = kLatentTile / kLanes;
  F32x16 p[kVectors], highest = broadcast(state[0]);
  QUIRE_UNROLL for (int i = 0; i < kVectors; ++i) {
    const F32x16 end = broadcast(static_cast<float>(visible - i * kLanes));
    p[i] = select_less(load(kIota), end, load(scores + i * kLanes) * broadcast(scale), broadcast(-__builtin_inff()));
    highest = max(p[i], highest);
  }
  const float new_highest = largest(highest);
  F32x16 factor[1] = {broadcast(state[0] - new_highest)};
  exp2_of_non_positive(factor);
  QUIRE_UNROLL for (int i = 0; i < kVectors; ++i) p[i] = p[i] - broadcast(new_highest);
  exp2_of_non_positive(p);
  F32x16 totals = load(state + kLanes) * factor[0];
  QUIRE_UNROLL for (int i = 0; i < kVectors; ++i) {
    totals = totals + p[i];
    store(scores + i * kLanes, p[i]);
  }
  state[0] = new_highest;
  store(state + kLanes, totals);
  for (int64_t i = kStateHead; i < kStateHead + value_width; i += kLanes) store(state + i, load(state + i) * factor[0]);
}

// One tile of some rows. visible(r): how many of the tile's tokens row r sees, at most num_tokens. Keys are read, and
// not used, up to the next multiple of kDotTokens.
template <typename Visible>
void attend_latent_tile(Matrix<const float> q, int64_t num_rows, int64_t key_width, Matrix<const float> keys,
                        Matrix<const float> values, int64_t value_width, int64_t num_tokens, float scale,
                        Visible visible, float* scores, Matrix<float> states) {
  const Matrix<float> weights{scores, kLatentTile};
  dots(q, num_rows, keys, num_tokens, key_width, weights);
  for (int64_t r = 0; r < num_rows; ++r) soften_row(weights.row(r), visible(r), scale, states.row(r), value_width);
  const Matrix<float> sums{states.row(0) + kStateHead, states.stride};
  add_weighted({scores, kLatentTile}, num_rows, values, num_tokens, value_width, sums);
}

// The weighted values over the sum of weights. Adding zero makes a sum of -0 the +0 that it is without masked tokens.
inline void finish_state(const float* state, int64_t value_width, float* out) {
  const F32x16 inverse = broadcast(1.0f / sum(load(state + kLanes)));
  for (int64_t i = 0; i < value_width; i += kLanes) store(out + i, load(state + kStateHead + i) * inverse + zero());
}

}  // namespace
}  // namespace quire
