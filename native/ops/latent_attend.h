// Latent attention in both of its forms (latent_work.h), each request in the cheaper form.
//
// Next to read: latent_softmax.h for the order of sums, latent_cache.h for the entries. The projection `up` has for
// each head U rows of keys, then O rows of values.
#pragma once
#include "ops/experts.h"
#include "ops/latent_cache.h"
#include "ops/latent_softmax.h"
#include "ops/latent_work.h"

namespace quire {

// Attention of each token to positions 0 … p of its request. Queries are C rotated values, then U others.
struct LatentAttendOp {
  const float* q;  // [T, H, C + U], f32, rows q_stride elements apart
  int64_t q_stride;
  Weight up;    // [H * (U + O), R]
  Rows out;     // [T, H * O]; O is a multiple of 32 if q8
  float* work;  // [T, H, work_size]: latent_work_size(); rows work_stride elements apart
  int64_t work_stride;
  int64_t num_heads;
  int64_t rank, rotary, nope, value;  // R, C, U, O
  float scale;
  KvLayer kv;

  LatentSizes sizes() const { return {rank, rotary, nope, value}; }
};

namespace {

// Values of `work` for one head of one token: absorbed, its query of R + C values, then its result of R; plain, its
// softmax so far.
inline int64_t latent_work_size(const LatentSizes& sizes) {
  const int64_t query = whole_lanes(sizes.rank + sizes.rotary), state = kStateHead + whole_lanes(sizes.value);
  return query > state ? query : state;
}

struct LatentStep {
  const LatentAttendOp& op;
  const Context& context;
  const Step& step;
  LatentSizes sizes;
  int64_t entry, work_size;  // of an entry and of `work`, in whole vectors

  LatentStep(const LatentAttendOp& o, const Context& c)
      : op(o),
        context(c),
        step(*c.step),
        sizes(o.sizes()),
        entry(whole_lanes(o.kv.head_size)),
        work_size(latent_work_size(sizes)) {}

  bool is_plain(int64_t r) const { return latent_cost(step.starts[r], step.counts[r], sizes).is_plain(); }
  float* work(int64_t token, int64_t head) const { return op.work + token * op.work_stride + head * work_size; }
  const float* query(int64_t token, int64_t head) const {
    return op.q + token * op.q_stride + head * (sizes.rotary + sizes.nope);
  }
  int64_t first_output(int64_t head) const { return head * (sizes.nope + sizes.value); }

  // Calls visit(first token, number of tokens) for consecutive tokens of the step in the absorbed form, at most `most`.
  template <typename Visit>
  void visit_absorbed(int64_t most, Visit visit) const {
    int64_t begin = 0, end = 0;
    for (int64_t r = 0; r <= step.num_requests; ++r) {
      if (r < step.num_requests && !is_plain(r)) {
        end += step.counts[r];
        continue;
      }
      for (; begin < end; begin += most) visit(begin, end - begin < most ? end - begin : most);
      if (r < step.num_requests) begin = end = step.first_tokens[r + 1];
    }
  }
};

constexpr int kDecodedInputs = 4;  // at once: with a sum each they fit the registers

// Inputs kDecodedInputs * group … of block `block`, each a vector of the tile's 16 outputs.
template <WeightFormat kFormat>
[[gnu::always_inline]] inline void decode_group(const QTile<kFormat>& from, int64_t block, int group,
                                                F32x16 (&values)[kDecodedInputs]) {
  using Tile = QTile<kFormat>;
  const int first = group * kDecodedInputs, chunk = first / line_inputs(kFormat);
  const auto copy_line = [](const uint8_t* line, uint32_t (&to)[kTile]) {
    store(reinterpret_cast<int32_t*>(to), load(reinterpret_cast<const int32_t*>(line)));
  };
  uint32_t low[kTile], upper[kTile] = {};
  copy_line(from.low(block, chunk), low);
  if constexpr (upper_bits(kFormat) > 0) {
    copy_line(from.upper(block, chunk), upper);
  }
  const F32x16 scale = from.scale(block, first * Tile::kParts / kBlock);
  QUIRE_UNROLL for (int i = 0; i < kDecodedInputs; ++i) {
    int32_t integers[kTile];
    for (int lane = 0; lane < kTile; ++lane) integers[lane] = integer_of<kFormat>(low[lane], upper[lane], first + i);
    values[i] = scale * to_float(load(integers));
    if constexpr (Tile::kHasMinima) values[i] = values[i] + from.minimum(block);
  }
}

// Block `block` of a tile as fp32 rows of its 16 outputs, `stride` elements apart.
template <WeightFormat kFormat>
void decode_rows(const std::byte* tile, int64_t blocks, int64_t block, float* out, int64_t stride) {
  const QTile<kFormat> from(tile, blocks);
  for (int group = 0; group < kBlock / kDecodedInputs; ++group, out += kDecodedInputs * stride) {
    F32x16 values[kDecodedInputs];
    decode_group<kFormat>(from, block, group, values);
    QUIRE_UNROLL for (int i = 0; i < kDecodedInputs; ++i) store(out + i * stride, values[i]);
  }
}

// Tiles `first` to `end` of a weight hold a head's keys, and from tile `next` on are those of the next head.
struct KeyTiles {
  const Weight& weight;
  int64_t first, end, next;
};

// out[i] = the sum over the outputs of a head's tiles of query * weight, for each input i of block `block`: `dots` with
// one row, whose weights need no memory.
template <WeightFormat kFormat>
void absorb_block(const KeyTiles& tiles, int64_t block, const float* query, float* out) {
  using Tile = QTile<kFormat>;
  constexpr int64_t kBlocksAhead = 3;
  const Weight& weight = tiles.weight;
  const int64_t blocks = weight.num_inputs / kBlock, bytes = tile_bytes(kFormat, weight.num_inputs);
  const auto tile_at = [&](int64_t index) { return Tile(weight.data + index * bytes, blocks); };
  const int64_t ahead = block + kBlocksAhead, then = ahead < blocks ? tiles.first : tiles.next;
  for (int group = 0; group < kBlock / kDecodedInputs; ++group) {
    const int chunk = group * kDecodedInputs / line_inputs(kFormat);
    F32x16 totals[kDecodedInputs];
    QUIRE_UNROLL for (int i = 0; i < kDecodedInputs; ++i) totals[i] = zero();
    for (int64_t tile = tiles.first; tile < tiles.end; ++tile, query += kTile) {
      prefetch_l1(tile_at(tile).low(block + 1, chunk));
      prefetch(tile_at(tile - tiles.first + then).low(ahead % blocks, chunk));
      F32x16 values[kDecodedInputs];
      decode_group<kFormat>(tile_at(tile), block, group, values);
      const F32x16 factor = load(query);
      QUIRE_UNROLL for (int i = 0; i < kDecodedInputs; ++i) totals[i] = fma(factor, values[i], totals[i]);
    }
    query -= (tiles.end - tiles.first) * kTile;
    sum_each(totals, out + group * kDecodedInputs);
  }
}

// Inputs of a packed tile as fp32 rows of its 16 outputs, `stride` elements apart: inputs first … first + count - 1, at
// most 32, from a multiple of 32 on.
inline void decode_inputs(const Weight& weight, const std::byte* tile, int64_t first, int64_t count, float* out,
                          int64_t stride) {
  if (weight.format == WeightFormat::f32 || weight.format == WeightFormat::f16) {
    const bool wide = weight.format == WeightFormat::f32;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = (first + i) * kTile;
      const F32x16 values = wide ? load(reinterpret_cast<const float*>(tile) + at)
                                 : widen_f16(reinterpret_cast<const uint16_t*>(tile) + at);
      store(out + i * stride, values);
    }
    return;
  }
  if (weight.format == WeightFormat::bf16) {
    uint32_t packed[kTile];
    for (int64_t i = 0; i < count; i += 2) {
      memcpy(packed, tile + (first + i) / 2 * sizeof packed, sizeof packed);
      uint32_t pair[2][kTile];
      for (int lane = 0; lane < kTile; ++lane) {
        pair[0][lane] = packed[lane] << 16;
        pair[1][lane] = packed[lane] & 0xffff0000u;
      }
      for (int64_t j = 0; j < 2 && i + j < count; ++j) memcpy(out + (i + j) * stride, pair[j], sizeof pair[j]);
    }
    return;
  }
  const auto decode = choose_by_format(weight.format, []<WeightFormat kFormat>() { return &decode_rows<kFormat>; });
  decode(tile, weight.num_inputs / kBlock, first / kBlock, out, stride);
}

// Fetches what decode_inputs reads of a tile from input `first` on: the lines after those of another tile are no stream
// that the hardware would follow.
inline void fetch_inputs(const Weight& weight, const std::byte* tile, int64_t first) {
  if (has_supers(weight.format)) {
    const SuperLayout at = super_layout(weight.format);
    const std::byte* super = tile + first / kSuper * at.bytes;
    for (int64_t i = 0; i < 256; i += 64) prefetch_l1(super + first % kSuper / kBlock * 256 + i);
    return prefetch_l1(super + at.scales);
  }
  const int64_t blocks = weight.num_inputs / kBlock, bytes = tile_bytes(weight.format, weight.num_inputs);
  const bool has_scales = wanted_rows(weight.format) == RowType::q8;
  const int64_t block_bytes = !has_scales ? bytes / blocks : weight.format == WeightFormat::q8 ? 512 : 256;
  for (int64_t i = 0; i < block_bytes; i += 64) prefetch_l1(tile + first / kBlock * block_bytes + i);
  const int64_t upper_bytes = 64 * upper_bits(weight.format),
                scale_bytes = weight.format == WeightFormat::mxfp4 ? kTile : 2 * kTile;
  const std::byte* upper = tile + blocks * block_bytes;
  if (upper_bytes > 0) prefetch_l1(upper + first / kBlock * upper_bytes);
  if (has_scales) prefetch_l1(upper + blocks * upper_bytes + first / kBlock * scale_bytes);
}

// work[t, h] = (U_h' q[t, h, C …], q[t, h, … C - 1]) for tokens first … first + count - 1: the query of the latents.
inline void absorb_queries(const LatentStep& at, int64_t head, int64_t first, int64_t count) {
  const LatentSizes& sizes = at.sizes;
  // The head's keys may begin within a tile of outputs: the queries have zeros for outputs of others.
  const int64_t tile = at.first_output(head) / kTile, offset = at.first_output(head) % kTile;
  const int64_t width = whole_lanes(offset + sizes.nope);
  auto* queries = reinterpret_cast<float*>(at.context.scratch);  // [kLatentTile][width]
  float* rows = queries + kLatentTile * width;                   // [kBlock][width]
  float* results = rows + kBlock * width;                        // [kLatentTile][kBlock]
  memset(queries, 0, static_cast<size_t>(count * width) * sizeof(float));
  for (int64_t t = 0; t < count; ++t) {
    const float* query = at.query(first + t, head);
    memcpy(queries + t * width + offset, query + sizes.rotary, static_cast<size_t>(sizes.nope) * sizeof(float));
    float* rest = at.work(first + t, head) + sizes.rank;
    memcpy(rest, query, static_cast<size_t>(sizes.rotary) * sizeof(float));
    for (int64_t i = sizes.rotary; i < at.entry - sizes.rank; ++i) rest[i] = 0.0f;
  }
  if (count == 1 && at.op.up.next == nullptr && wanted_rows(at.op.up.format) == RowType::q8) {
    const KeyTiles tiles{at.op.up, tile, tile + width / kTile, at.first_output(head + 1) / kTile};
    const auto absorb =
        choose_by_format(at.op.up.format, []<WeightFormat kFormat>() { return &absorb_block<kFormat>; });
    for (int64_t b = 0; b < sizes.rank / kBlock; ++b) absorb(tiles, b, queries, at.work(first, head) + b * kBlock);
    return;
  }
  for (int64_t column = 0; column < sizes.rank; column += kBlock) {
    const int64_t columns = sizes.rank - column < kBlock ? sizes.rank - column : kBlock;
    for (int64_t i = 0; i < width; i += kTile) {
      const WeightTile from = tile_of(at.op.up, tile + i / kTile);
      if (column + kBlock < sizes.rank) fetch_inputs(from.weight, from.data, column + kBlock);
      decode_inputs(from.weight, from.data, column, columns, rows + i, width);
    }
    dots({queries, width}, count, {rows, width}, columns, width, {results, kBlock});
    for (int64_t t = 0; t < count; ++t) {
      memcpy(at.work(first + t, head) + column, results + t * kBlock, static_cast<size_t>(columns) * sizeof(float));
    }
  }
}

// out[t, h] = V_h work[t, h, … R - 1] for tokens first … first + count - 1: a result as values of the head.
inline void expand_results(const LatentStep& at, int64_t head, int64_t first, int64_t count) {
  const LatentSizes& sizes = at.sizes;
  const Rows x{at.context.scratch, stride_of((sizes.rank + 1) * 4), wanted_rows(at.op.up.format)};
  auto* values = reinterpret_cast<float*>(at.context.scratch + kLatentTile * x.stride_bytes);
  for (int64_t t = 0; t < count; ++t) {
    write_columns(x, t, 0, sizes.rank, at.work(first + t, head));
    finish_row(x, t, sizes.rank);
  }
  for (int64_t column = 0; column < sizes.value; column += kPanelWidth) {
    const int64_t columns = sizes.value - column < kPanelWidth ? sizes.value - column : kPanelWidth;
    const int64_t output = at.first_output(head) + sizes.nope + column;
    const float* y = multiply_outputs(at.op.up, nullptr, x, 0, count, output, columns, kUnalignedWidth, values);
    for (int64_t t = 0; t < count; ++t) {
      write_columns(at.op.out, first + t, head * sizes.value + column, columns, y + t * kUnalignedWidth);
    }
  }
}

// Some rows of one request: absorbed, a row is a head of a token, token by token; plain, a token of one head.
struct LatentUnit {
  int64_t request;
  bool plain;
  int64_t head;  // plain
  int64_t first, count;
};

// Calls visit(unit, its cost) for all units of a step.
template <typename Visit>
void visit_units(const LatentStep& at, Visit visit) {
  const LatentSizes& sizes = at.sizes;
  const int64_t heads = at.op.num_heads, requests = at.step.num_requests;
  // Each request in as many parts as there are threads for it.
  const int64_t wanted = (at.context.num_threads + requests - 1) / (requests > 0 ? requests : 1);
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t count = at.step.counts[r], end = at.step.starts[r] + count;
    const bool plain = at.is_plain(r);
    const int64_t rows = plain ? count : count * heads;
    int64_t parts = plain ? (wanted + heads - 1) / heads : (rows + kLatentRows - 1) / kLatentRows;
    if (!plain && parts < wanted) parts = wanted;
    if (parts > rows) parts = rows;
    const int64_t expansion = sizes.rank * (sizes.nope + sizes.value);
    const int64_t score = plain ? sizes.nope + sizes.rotary + sizes.value : 2 * sizes.rank + sizes.rotary;
    for (int64_t head = 0; head < (plain ? heads : 1); ++head) {
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = rows * part / parts, last = rows * (part + 1) / parts;
        visit(LatentUnit{r, plain, head, first, last - first},
              end * ((last - first) * score + (plain ? expansion : sizes.rank)));
      }
    }
  }
}

inline void attend_absorbed(const LatentStep& at, const LatentUnit& unit) {
  const LatentSizes& sizes = at.sizes;
  const int64_t heads = at.op.num_heads, value_width = whole_lanes(sizes.rank), state_size = kStateHead + value_width;
  auto* queries = reinterpret_cast<float*>(at.context.scratch);  // [rows][entry]
  float* keys = queries + kLatentRows * at.entry;                // [kLatentTile][entry]
  float* scores = keys + kLatentTile * at.entry;
  float* states = scores + kLatentRows * kLatentTile;
  const int32_t* table = at.step.block_table(at.op.kv.group, unit.request);
  const int64_t start = at.step.starts[unit.request], token = at.step.first_tokens[unit.request];
  const auto place = [&](int64_t row) {
    return at.work(token + (unit.first + row) / heads, (unit.first + row) % heads);
  };
  for (int64_t r = 0; r < unit.count; ++r) {
    memcpy(queries + r * at.entry, place(r), static_cast<size_t>(at.entry) * sizeof(float));
    begin_state(states + r * state_size, value_width);
  }
  const int64_t end = start + (unit.first + unit.count - 1) / heads + 1;
  for (int64_t begin = 0; begin < end; begin += kLatentTile) {
    const int64_t count = end - begin < kLatentTile ? end - begin : kLatentTile;
    for (int64_t i = 0; i < count; ++i) {
      widen_entry(at.op.kv, latent_entry(at.op.kv, table, begin + i), keys + i * at.entry);
    }
    const auto visible = [&](int64_t r) { return start + (unit.first + r) / heads + 1 - begin; };
    attend_latent_tile({queries, at.entry}, unit.count, at.entry, {keys, at.entry}, {keys, at.entry}, value_width,
                       count, at.op.scale * 1.44269504f, visible, scores, {states, state_size});
  }
  for (int64_t r = 0; r < unit.count; ++r) {
    finish_state(states + r * state_size, value_width, queries);
    memcpy(place(r), queries, static_cast<size_t>(sizes.rank) * sizeof(float));
  }
}

// Keys [tokens][C + U] and values [tokens][O] of one head for positions begin … begin + count - 1.
struct Expanded {
  Matrix<float> keys, values;
  Rows latents;
  float* entry;
  float* products;
};
inline void expand_tile(const LatentStep& at, const LatentUnit& unit, int64_t begin, int64_t count, Expanded& to) {
  const LatentSizes& sizes = at.sizes;
  const int32_t* table = at.step.block_table(at.op.kv.group, unit.request);
  for (int64_t i = 0; i < count; ++i) {
    widen_entry(at.op.kv, latent_entry(at.op.kv, table, begin + i), to.entry);
    write_columns(to.latents, i, 0, sizes.rank, to.entry);
    finish_row(to.latents, i, sizes.rank);
    memcpy(to.keys.row(i), to.entry + sizes.rank, static_cast<size_t>(sizes.rotary) * sizeof(float));
  }
  const auto expand = [&](int64_t output, int64_t width, float* first, int64_t stride) {
    for (int64_t column = 0; column < width; column += kPanelWidth) {
      const int64_t columns = width - column < kPanelWidth ? width - column : kPanelWidth;
      const float* y = multiply_outputs(at.op.up, nullptr, to.latents, 0, count, output + column, columns,
                                        kUnalignedWidth, to.products);
      for (int64_t i = 0; i < count; ++i) {
        memcpy(first + i * stride + column, y + i * kUnalignedWidth, static_cast<size_t>(columns) * sizeof(float));
      }
    }
  };
  const int64_t output = at.first_output(unit.head);
  expand(output, sizes.nope, to.keys.row(0) + sizes.rotary, to.keys.stride);
  expand(output + sizes.nope, sizes.value, to.values.row(0), to.values.stride);
}

inline void attend_plain(const LatentStep& at, const LatentUnit& unit) {
  const LatentSizes& sizes = at.sizes;
  const int64_t head_size = sizes.rotary + sizes.nope, key_width = whole_lanes(head_size);
  const int64_t value_width = whole_lanes(sizes.value), row_bytes = stride_of((sizes.rank + 1) * 4);
  auto* queries = reinterpret_cast<float*>(at.context.scratch);  // [kLatentRows][key_width]
  float* scores = queries + kLatentRows * key_width;
  Expanded tile{};
  tile.keys = {scores + kLatentRows * kLatentTile, key_width};
  tile.values = {tile.keys.row(kLatentTile), value_width};
  tile.entry = tile.values.row(kLatentTile);
  tile.products = tile.entry + at.entry;
  auto* latents = reinterpret_cast<std::byte*>(tile.products + kPanelRows * kUnalignedWidth);
  tile.latents = {latents, row_bytes, wanted_rows(at.op.up.format)};
  // Past the last value of a row keys, values and queries stay zero.
  memset(queries, 0, static_cast<size_t>(latents - at.context.scratch));
  const int64_t first_token = at.step.first_tokens[unit.request] + unit.first;
  const int64_t first_position = at.step.starts[unit.request] + unit.first;
  const Matrix<float> states{at.work(first_token, unit.head), at.op.work_stride};
  for (int64_t r = 0; r < unit.count; ++r) begin_state(states.row(r), value_width);
  for (int64_t begin = 0; begin < first_position + unit.count; begin += kLatentTile) {
    const int64_t left = first_position + unit.count - begin, count = left < kLatentTile ? left : kLatentTile;
    expand_tile(at, unit, begin, count, tile);
    for (int64_t row = begin > first_position ? begin - first_position : 0; row < unit.count; row += kLatentRows) {
      const int64_t rows = unit.count - row < kLatentRows ? unit.count - row : kLatentRows;
      for (int64_t r = 0; r < rows; ++r) {
        memcpy(queries + r * key_width, at.query(first_token + row + r, unit.head),
               static_cast<size_t>(head_size) * sizeof(float));
      }
      const auto visible = [&](int64_t r) { return first_position + row + r + 1 - begin; };
      attend_latent_tile({queries, key_width}, rows, key_width, {tile.keys.data, key_width},
                         {tile.values.data, value_width}, value_width, count, at.op.scale * 1.44269504f, visible,
                         scores, {states.row(row), states.stride});
    }
  }
  for (int64_t r = 0; r < unit.count; ++r) {
    finish_state(states.row(r), value_width, tile.entry);
    write_columns(at.op.out, first_token + r, unit.head * sizes.value, sizes.value, tile.entry);
  }
}

inline void latent_attend(const LatentAttendOp& op, const Context& context) {
  const LatentStep at(op, context);
  const TileSession session(wanted_rows(op.up.format));
  int64_t total = 0, items = 0;
  visit_units(at, [&](const LatentUnit&, int64_t cost) { total += cost; });
  at.visit_absorbed(kLatentTile, [&](int64_t, int64_t) { items += op.num_heads; });
  // Heads one after another: a thread's share reads as few heads' weights as it can.
  const Range mine = share(items, context);
  const auto for_absorbed = [&](auto compute) {
    for (int64_t head = 0, item = 0; head < op.num_heads; ++head) {
      at.visit_absorbed(kLatentTile, [&](int64_t first, int64_t count) {
        if (item >= mine.begin && item < mine.end) compute(at, head, first, count);
        ++item;
      });
    }
  };
  if (items > 0) {
    for_absorbed(absorb_queries);
    wait_for_all(*context.barrier);
  }
  int64_t before = 0;
  visit_units(at, [&](const LatentUnit& unit, int64_t cost) {
    const int64_t middle = before + cost / 2;
    before += cost;
    if (static_cast<int64_t>(static_cast<double>(middle) / static_cast<double>(total) * context.num_threads) !=
        context.thread) {
      return;
    }
    if (unit.plain) {
      attend_plain(at, unit);
    } else {
      attend_absorbed(at, unit);
    }
  });
  if (items > 0) {
    wait_for_all(*context.barrier);
    for_absorbed(expand_results);
  }
  // The zero that pairs with the last value of a bf16 row of odd width.
  if (context.thread == 0) {
    for (int64_t t = 0; t < context.step->num_tokens; ++t) finish_row(op.out, t, op.num_heads * op.value);
  }
}

QUIRE_OP(latent_attend, LatentAttendOp, q, q_stride, up, out, work, work_stride, num_heads, rank, rotary, nope, value,
         scale, kv)

}  // namespace
}  // namespace quire
