// Attention of a few rows (queries of one KV head) to one tile of positions: scores, their softmax and the weighted sum
// of values. Tiles start at multiples of kTileTokens whatever the rows: a row's result is its tiles' results merged in
// order (attend_state.h), and a tile's result for a row does not depend on the other rows.
#pragma once
#include "ops/attend_formats.h"
#include "ops/attend_state.h"
#include "ops/attend_work.h"
#include "ops/functions.h"

namespace quire {
namespace {

// How far keys and values are fetched ahead. On processors with AMX into L2 and in the order of addresses, which
// Intel's own prefetchers follow: 8 decodes of 2,048 positions take 12 % less time. With AVX-512 into L1: far enough to
// hide memory, near enough that what is on its way and what is read fit L1 together. There a line fetched into L2 would
// wait for one of L1's few places for misses twice. With half of it int8 took 30 % longer, with twice as much bf16 9 %
// (one thread of Zen 5). With AVX2 into L2 and values in the order of addresses, since a tile of bf16 alone fills L1: 8
// decodes of 2,048 positions take 7 to 18 % less time, and half the distance takes 2 to 5 % more than that (Zen 3).
#if defined(QUIRE_TILES)
constexpr int64_t kReadAheadBytes = 16 << 10;
constexpr bool kKeysInOrder = true, kValuesInOrder = false;
inline void prefetch_ahead(const void* p) { prefetch(p); }
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr int64_t kReadAheadBytes = 32 << 10;
constexpr bool kKeysInOrder = false, kValuesInOrder = true;
inline void prefetch_ahead(const void* p) { prefetch(p); }
#else
constexpr int64_t kReadAheadBytes = 8 << 10;
constexpr bool kKeysInOrder = false, kValuesInOrder = false;
inline void prefetch_ahead(const void* p) { prefetch_l1(p); }
#endif

// R rows x C groups of 16 tokens: each key is loaded once for R rows, each query step once for C groups. What lies at
// `ahead` is prefetched: as many bytes of each group as are read.
template <class Kv, int R, int C>
void score_block(const std::byte* const* keys, const std::byte* const* ahead, const std::byte* queries,
                 int64_t query_stride, int64_t steps, typename Kv::Number* out) {
  typename Kv::Sum y[R][C];
  QUIRE_UNROLL for (int r = 0; r < R; ++r) { QUIRE_UNROLL for (int c = 0; c < C; ++c) y[r][c] = Kv::none(); }
  const bool in_order = kKeysInOrder && steps % C == 0;
  const std::byte* line = nullptr;
  int64_t turn = 0;
  for (int64_t i = 0; i < steps; ++i) {
    if (in_order && i == turn) line = *ahead++, turn += steps / C;
    QUIRE_UNROLL for (int c = 0; c < C; ++c) {
      prefetch_ahead(in_order ? line + c * Kv::kKeyBytes : ahead[c] + i * Kv::kKeyBytes);
    }
    if (in_order) line += C * Kv::kKeyBytes;
    QUIRE_UNROLL for (int part = 0; part < Kv::kParts; ++part) {
      decltype(Kv::key(keys[0], 0)) key[C];
      QUIRE_UNROLL for (int c = 0; c < C; ++c) key[c] = Kv::key(keys[c] + i * Kv::kKeyBytes, part);
      QUIRE_UNROLL for (int r = 0; r < R; ++r) {
        const auto query = Kv::query(queries + r * query_stride + i * Kv::kQueryBytes, part);
        QUIRE_UNROLL for (int c = 0; c < C; ++c) y[r][c] = in_registers(Kv::add(key[c], query, y[r][c]));
      }
    }
  }
  QUIRE_UNROLL for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL for (int c = 0; c < C; ++c) store(out + r * kTileTokens + c * kGroup, y[r][c]);
  }
}

// Values of consecutive steps: step i's 16 C dimensions at values + i * the row's bytes, its weights at offset
// `weights` of each row of weights. What lies at `ahead` is prefetched, one row's bytes apart or without gaps.
struct Run {
  const std::byte* values;
  const std::byte* ahead;
  int64_t steps;
  int64_t weights;
};

// R rows x 16 C dimensions.
template <class Kv, int R, int C>
void weigh_block(const Run* runs, int64_t num_runs, int64_t row_bytes, const std::byte* weights,
                 typename Kv::Number* out, int64_t out_stride) {
  typename Kv::Sum y[R][C];
  QUIRE_UNROLL for (int r = 0; r < R; ++r) { QUIRE_UNROLL for (int c = 0; c < C; ++c) y[r][c] = Kv::none(); }
  for (const Run* run = runs; run < runs + num_runs; ++run) {
    const std::byte* v = run->values;
    const std::byte* ahead = run->ahead;
    const std::byte* w = weights + run->weights;
    const int64_t ahead_bytes = kValuesInOrder ? C * Kv::kValueBytes : row_bytes;
    for (int64_t i = 0; i < run->steps; ++i, v += row_bytes, ahead += ahead_bytes, w += Kv::kWeightBytes) {
      QUIRE_UNROLL for (int c = 0; c < C; ++c) {
        if (c * Kv::kValueBytes % 64 == 0) prefetch_ahead(ahead + c * Kv::kValueBytes);
      }
      QUIRE_UNROLL for (int part = 0; part < Kv::kParts; ++part) {
        decltype(Kv::value(v, 0)) value[C];
        QUIRE_UNROLL for (int c = 0; c < C; ++c) value[c] = Kv::value(v + c * Kv::kValueBytes, part);
        QUIRE_UNROLL for (int r = 0; r < R; ++r) {
          const auto weight = Kv::weight(w + r * kTileTokens * 4, part);
          QUIRE_UNROLL for (int c = 0; c < C; ++c) y[r][c] = in_registers(Kv::add(value[c], weight, y[r][c]));
        }
      }
    }
  }
  QUIRE_UNROLL for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL for (int c = 0; c < C; ++c) store(out + r * out_stride + c * kLanes, y[r][c]);
  }
}

// The kernels for 1 … R rows.
template <class Kv, int C, int R = Kv::kRows>
void score_rows(int64_t rows, const std::byte* const* keys, const std::byte* const* ahead, const std::byte* queries,
                int64_t query_stride, int64_t steps, typename Kv::Number* out) {
  if constexpr (R > 1) {
    if (rows < R) return score_rows<Kv, C, R - 1>(rows, keys, ahead, queries, query_stride, steps, out);
  }
  score_block<Kv, R, C>(keys, ahead, queries, query_stride, steps, out);
}
template <class Kv, int C, int R = Kv::kRows>
void weigh_rows(int64_t rows, const Run* runs, int64_t num_runs, int64_t row_bytes, const std::byte* weights,
                typename Kv::Number* out, int64_t out_stride) {
  if constexpr (R > 1) {
    if (rows < R) return weigh_rows<Kv, C, R - 1>(rows, runs, num_runs, row_bytes, weights, out, out_stride);
  }
  weigh_block<Kv, R, C>(runs, num_runs, row_bytes, weights, out, out_stride);
}

// Where the groups of one tile are that some row sees: `first` … `end` - 1.
struct TileKeys {
  int64_t first, end;
  const std::byte* keys[kTileGroups];
  const float* scales[kTileGroups];  // i8: of keys, and a block's tokens on of values
  const std::byte* values[kTileGroups];
};

inline void find_keys(const KvLayer& kv, const int32_t* table, const Item& item, int64_t index, TileKeys* tile) {
  const int64_t begin = index * kTileTokens, end = begin + kTileTokens;
  tile->first = (item.low > begin ? item.low - begin : 0) / kGroup;
  tile->end = ((item.high < end ? item.high : end) - begin + kGroup - 1) / kGroup;
  const int64_t position = begin + tile->first * kGroup;
  int64_t block = position / kv.block_size, group = position % kv.block_size / kGroup;
  KvHead place = kv_head(kv, table[block], item.head);
  for (int64_t g = tile->first; g < tile->end; ++g, ++group) {
    if (group * kGroup == kv.block_size) {
      group = 0;
      place = kv_head(kv, table[++block], item.head);
    }
    tile->keys[g] = place.keys + group * key_group_bytes(kv.format, kv.head_size);
    tile->values[g] = place.values + group * value_group_bytes(kv.format, kv.head_size);
    tile->scales[g] = place.scales + group * kGroup;
  }
  // The tile before prefetches the scales of all groups.
  for (int64_t g = 0; g < kTileGroups; ++g) {
    if (g < tile->first || g >= tile->end) tile->scales[g] = tile->scales[tile->first];
  }
}

// The groups of a tile and of the next one in the order in which they are read: keys, values, the next one's. While
// one is read, that which is `distance` further on is fetched.
struct Stream {
  int64_t values;  // where the tile's values begin
  int64_t distance;
  const std::byte* groups[4 * kTileGroups + 1];

  const std::byte* const* ahead(int64_t index) const { return groups + index + distance; }

  // What to fetch while C of `vectors` vectors, from number `c` on, of the values of run `i` are read.
  template <class Kv, int C>
  const std::byte* ahead_in_order(int64_t vectors, int64_t c, int64_t i) const {
    constexpr int64_t kBytes = kGroup / Kv::kTokens * C * Kv::kValueBytes;
    const int64_t parts = (vectors + C - 1) / C, part = c / C * values + i;
    return ahead(values)[part / parts] + part % parts * kBytes;
  }
};
template <class Kv>
Stream make_stream(const KvLayer& kv, const TileKeys& tile, const TileKeys& next) {
  Stream stream;
  int64_t count = 0;
  const TileKeys* tiles[2] = {&tile, &next};
  for (const TileKeys* part : tiles) {
    for (int64_t g = part->first; g < part->end; ++g) stream.groups[count++] = part->keys[g];
    for (int64_t g = part->first; g < part->end; ++g) stream.groups[count++] = part->values[g];
  }
  for (; count <= 4 * kTileGroups; ++count) stream.groups[count] = stream.groups[count - 1];
  stream.values = tile.end - tile.first;
  // Where a weighted sum goes through the values several times, it reads that much of each group at once.
  constexpr int64_t kPart = kGroup / Kv::kTokens * Kv::kVectors * Kv::kValueBytes;
  const int64_t whole = value_group_bytes(kv.format, kv.head_size);
  const int64_t distance = kReadAheadBytes / (kValuesInOrder || whole < kPart ? whole : kPart);
  // Groups that are read together must not fetch each other.
  constexpr int64_t kMost = kValuesInOrder ? 2 * kTileGroups : kTileGroups;
  stream.distance = distance < Kv::kVectors ? Kv::kVectors : distance > kMost ? kMost : distance;
  return stream;
}

// A softmax reads nothing. Memory goes on meanwhile: each of the first rows' fetches some lines of what the weighted
// sum will fetch. Always inline: GCC takes a function that only prefetches for one without effects and drops its calls.
[[gnu::always_inline]] inline void prefetch_some(const Stream& stream, int64_t row) {
  constexpr int64_t kRows = 4, kLines = 4;
  if (row >= kRows) return;
  const std::byte* const* groups = stream.ahead(stream.values);
  for (int64_t g = 0; g < stream.values; ++g) {
    QUIRE_UNROLL for (int64_t i = 0; i < kLines; ++i) prefetch_ahead(groups[g] + (row * kLines + i) * 64);
  }
}

// Groups of at most kRows rows that are as even as can be: 7 rows are 4 and 3.
template <class Kv, class Function>
void for_rows(int64_t num_rows, Function function) {
  const int64_t parts = (num_rows + Kv::kRows - 1) / Kv::kRows;
  for (int64_t part = 0, row = 0; part < parts; ++part) {
    const int64_t rows = (num_rows - row + parts - part - 1) / (parts - part);
    function(row, rows);
    row += rows;
  }
}

// Calls visit<C>(first) for vectors begin … end - 1, kVectors at once or, at the end, one.
template <class Kv, class Visit>
void for_vectors(int64_t begin, int64_t end, Visit visit) {
  constexpr int kMost = Kv::kVectors;
  for (; begin + kMost <= end; begin += kMost) visit.template operator()<kMost>(begin);
  for (; begin < end; ++begin) visit.template operator()<1>(begin);
}

// The first rows' kernel fetches what is further on; the others' have only what they read to name.
template <class Kv>
void score_tile(const AttendRows& rows, const TileKeys& tile, const Stream& stream, int64_t steps) {
  auto* scores = reinterpret_cast<typename Kv::Number*>(rows.scores);
  for_vectors<Kv>(tile.first, tile.end, [&]<int C>(int64_t g) {
    const std::byte* const* ahead = stream.ahead(g - tile.first);
    for_rows<Kv>(rows.count, [&](int64_t row, int64_t count) {
      const std::byte* queries = rows.queries + row * rows.query_stride;
      auto* out = scores + row * kTileTokens + g * kGroup;
      score_rows<Kv, C>(count, tile.keys + g, ahead, queries, rows.query_stride, steps, out);
      ahead = tile.keys + g;
    });
  });
}

template <class Kv>
void weigh_tile(const AttendRows& rows, const Stream& stream, const Run* runs, int64_t num_runs, int64_t row_bytes,
                std::byte* sums) {
  const int64_t vectors = rows.stride / kLanes;
  for_vectors<Kv>(0, vectors, [&]<int C>(int64_t c) {
    Run moved[kTileGroups + 1];
    for (int64_t i = 0; i < num_runs; ++i) {
      const std::byte* ahead =
          kValuesInOrder ? stream.ahead_in_order<Kv, C>(vectors, c, i) : runs[i].ahead + c * Kv::kValueBytes;
      moved[i] = {runs[i].values + c * Kv::kValueBytes, ahead, runs[i].steps, runs[i].weights};
    }
    for_rows<Kv>(rows.count, [&](int64_t row, int64_t count) {
      const std::byte* weights = rows.scores + row * kTileTokens * 4;
      auto* out = reinterpret_cast<typename Kv::Number*>(sums) + row * rows.stride + c * kLanes;
      weigh_rows<Kv, C>(count, moved, num_runs, row_bytes, weights, out, rows.stride);
      for (int64_t i = 0; i < num_runs; ++i) moved[i].ahead = moved[i].values;
    });
  });
}

}  // namespace
}  // namespace quire
