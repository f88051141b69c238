// Attention over paged keys and values (Vaswani 2017, eq. 1) with an online softmax (Milakov & Gimelshein 2018): each
// row's result is that of tiles of 128 positions at fixed places, merged in order.
//
// Next to read: attend_work.h (how threads share the work), attend_tile.h (the kernels), attend_formats.h (orders of
// sums).
#pragma once
#include "ops/attend_amx.h"
#include "ops/attend_rows.h"
#include "ops/attend_softmax.h"
#include "ops/attend_tile.h"
#include "ops/attend_work.h"

namespace quire {
namespace {

constexpr int64_t kPartialsAt = kScratchBytes / 2;  // the scratch's second half: results of tiles for other threads

// The values of tokens low … high - 1 of a tile as runs. The token that pairs with the last one may not be written yet:
// it is read as zero. Where D is no multiple of 16, values are copied to rows that are.
template <class Kv>
int64_t make_runs(const KvLayer& kv, const AttendRows& rows, const TileKeys& tile, const Stream& stream, int64_t low,
                  int64_t high, Run* runs, int64_t* row_bytes) {
  const int64_t step_bytes = kv.head_size * Kv::kValueBytes / kLanes, padded = rows.stride * Kv::kValueBytes / kLanes;
  const bool copies = padded != step_bytes;
  std::byte* free = rows.padded;
  const std::byte* const* ahead = stream.ahead(stream.values);
  int64_t count = 0;
  for (int64_t g = tile.first; g < tile.end; ++g) {
    const int64_t begin = low > g * kGroup ? low - g * kGroup : 0;
    const int64_t end = high < (g + 1) * kGroup ? high - g * kGroup : kGroup;
    int64_t first = begin / Kv::kTokens, steps = end / Kv::kTokens;
    const int64_t weights = g * kGroup / Kv::kTokens * Kv::kWeightBytes;
    const bool half = end % Kv::kTokens != 0;
    const std::byte* values = tile.values[g];
    if (copies) {
      for (int64_t i = first; i < steps; ++i) {
        memcpy(free + i * padded, values + i * step_bytes, static_cast<size_t>(step_bytes));
      }
      values = free;
      free += kGroup / Kv::kTokens * padded;
    }
    if (steps > first) {
      runs[count++] = {values + first * padded, ahead[g - tile.first], steps - first,
                       weights + first * Kv::kWeightBytes};
    }
    if (half) {
      const std::byte* last = tile.values[g] + steps * step_bytes;
      for (int64_t i = 0; i < step_bytes; i += 2) {
        // Pairs of one-byte values are exact integers: garbage times zero is zero.
        const bool keep = Kv::kScaled || i % 4 == 0;
        free[i] = keep ? last[i] : std::byte{0};
        free[i + 1] = keep ? last[i + 1] : std::byte{0};
      }
      runs[count++] = {free, free, 1, weights + steps * Kv::kWeightBytes};
    }
  }
  *row_bytes = padded;
  return count;
}

// All rows' scores to weights; int8: and the weights' scales to `factors`. Where seen_of(row) is constant, as in most
// tiles of a long prompt, loops over groups have no ends to compute.
template <class Kv, class SeenOf>
void soften_rows(const AttendOp& op, const AttendRows& rows, const Stream& stream, const TileKeys& tile, float* factors,
                 SeenOf seen_of) {
  // All rows' highest scores before the first weight: the many reductions overlap.
  for (int64_t row = 0; row < rows.count; ++row) {
    const Seen seen = seen_of(row);
    if (Kv::kScaled) scale_scores(rows, row, seen, tile.scales);
    if (rows.cap_scale != 0.0f) cap_scores(rows, row, seen);
    find_highest(rows, row, seen);
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    prefetch_some(stream, row);
    if constexpr (Kv::kScaled) {
      factors[row] = soften_scaled(rows, row, seen_of(row), tile.scales, op.kv.block_size);
    } else {
      soften<Kv>(rows, row, seen_of(row));
    }
  }
}

// One tile's result of an item's rows, to rows.tile.
template <class Kv>
void attend_tile(const AttendOp& op, const Item& item, int64_t index, const TileKeys& tile, const TileKeys& next,
                 const AttendRows& rows) {
  const int64_t begin = index * kTileTokens, width = op.kv.head_size;
  const int64_t low = item.low > begin ? item.low : begin;
  const int64_t high = item.high < begin + kTileTokens ? item.high : begin + kTileTokens;
  if constexpr (Kv::kScaled) {
    for (int64_t g = 0; g < kTileGroups; ++g) {
      prefetch(next.scales[g]);
      prefetch(next.scales[g] + op.kv.block_size);
    }
  }
  const Stream stream = make_stream<Kv>(op.kv, tile, next);
  score_tile<Kv>(rows, tile, stream, (width + Kv::kDims - 1) / Kv::kDims);
  float factors[kAttendRows];
  if (sees_whole_tile(rows, begin)) {
    constexpr Seen kAll{0, kTileGroups, 0, kTileTokens, 0, kTileGroups};
    soften_rows<Kv>(op, rows, stream, tile, factors, [](int64_t) { return kAll; });
  } else {
    soften_rows<Kv>(op, rows, stream, tile, factors,
                    [&](int64_t row) { return seen_by(rows, row, begin, tile.first, tile.end); });
  }
  Run runs[kTileGroups + 1];
  int64_t row_bytes;
  const int64_t num_runs = make_runs<Kv>(op.kv, rows, tile, stream, low - begin, high - begin, runs, &row_bytes);
  weigh_tile<Kv>(rows, stream, runs, num_runs, row_bytes, reinterpret_cast<std::byte*>(rows.tile.sums));
  if constexpr (Kv::kScaled) {
    for (int64_t row = 0; row < rows.count; ++row) {
      float* sums = rows.tile.sums + row * rows.stride;
      for (int64_t i = 0; i < rows.stride; i += kLanes) {
        store(sums + i, to_float(load(reinterpret_cast<const int32_t*>(sums + i))) * broadcast(factors[row]));
      }
    }
  }
}

// One thread's tiles of one item: all, its beginning, or a later part, whose tiles' results another thread merges.
struct Task {
  Item item;
  int64_t before;  // the cost of the items before this one
  int64_t first, end;
};

inline void find_keys(const AttendOp& op, const Step& step, const Item& item, int64_t tile, TileKeys* keys) {
  find_keys(op.kv, step.block_table(op.kv.group, item.request), item, tile, keys);
}

// Calls compute(tile) for the tiles of a task in order. It leaves each result in rows->tile, which this thread merges,
// or leaves to the thread with the item's first tile.
template <class Compute>
void merge_tiles(const AttendOp& op, const Context& context, const Task& task, AttendRows* rows, Compute compute) {
  const Item& item = task.item;
  const bool begins = task.first == item.first_tile;
  const Partial own = rows->tile;
  for (int64_t i = 0; task.first + i < task.end; ++i) {
    if (!begins) {
      std::byte* memory = context.scratch + kPartialsAt + i * partial_bytes(item.memory_rows(), rows->stride);
      rows->tile = partial_at(memory, item.memory_rows());
    } else if (i == 0) {
      rows->tile = rows->total;
    }
    compute(task.first + i);
    rows->tile = own;
    if (begins && i > 0) merge(rows->tile, rows->count, rows->stride, rows->total);
  }
  if (begins && task.end == item.end_tile) write_rows(op, *context.step, item, *rows);
}

// While a tile is computed the next one is fetched, at the end that of the task that follows, if any. keys[0] is the
// task's first tile, and at the end that of the next one.
template <class Kv>
void attend_task(const AttendOp& op, const Context& context, const Task& task, const Task* following, AttendRows* rows,
                 TileKeys* keys) {
  const Step& step = *context.step;
  const Item& item = task.item;
  load_rows<Kv>(op, step, item, rows);
  merge_tiles(op, context, task, rows, [&](int64_t tile) {
    if (tile + 1 < task.end) {
      find_keys(op, step, item, tile + 1, &keys[1]);
    } else if (following != nullptr) {
      find_keys(op, step, following->item, following->first, &keys[1]);
    } else {
      keys[1] = keys[0];
    }
    attend_tile<Kv>(op, item, tile, keys[0], keys[1], *rows);
    keys[0] = keys[1];
  });
}

// The rest of an item that this thread began: other threads' tiles, in order.
inline void finish_task(const AttendOp& op, const Context& context, const Shares& shares, const Task& task,
                        const AttendRows& rows) {
  const Item& item = task.item;
  for (int64_t thread = context.thread + 1; thread < context.num_threads; ++thread) {
    const int64_t first = shares.end_tile(item, task.before, thread - 1);
    const int64_t end = shares.end_tile(item, task.before, thread);
    for (int64_t tile = first; tile < end; ++tile) {
      std::byte* memory = scratch_of(context, thread) + kPartialsAt;
      memory += (tile - first) * partial_bytes(item.memory_rows(), rows.stride);
      merge(partial_at(memory, item.memory_rows()), item.num_rows, rows.stride, rows.total);
    }
  }
  write_rows(op, *context.step, item, rows);
}

template <class Kv>
void attend_with(const AttendOp& op, const Context& context) {
  const Step& step = *context.step;
  // In the same memory: the rows of one item at a time.
  AttendRows few = lay_out(op, context.scratch);
  AmxItems many(op, context);
  Shares shares{0, context.num_threads, few.stride, kScratchBytes - kPartialsAt};
  for_items(op, context, 1, [&](const Item& item) { shares.total += item.cost * op.kv.num_kv_heads; });
  const int64_t my_begin = context.thread == 0 ? 0 : shares.end(context.thread - 1);
  const int64_t my_end = shares.end(context.thread);
  int64_t before = 0;
  bool has_task = false, has_keys = false, meets = false;
  Task task{};
  TileKeys keys[2];
  const auto run = [&](const Task* following) {
    if (task.item.amx) {
      many.load(task.item);
      merge_tiles(op, context, task, &many.rows, [&](int64_t segment) { many.attend(task.item, segment); });
      has_keys = false;
      return;
    }
    if (!has_keys) find_keys(op, step, task.item, task.first, &keys[0]);
    has_keys = following != nullptr && !following->item.amx;
    attend_task<Kv>(op, context, task, has_keys ? following : nullptr, &few, keys);
  };
  for_items(op, context, op.kv.num_kv_heads, [&](const Item& item) {
    const int64_t begin = before;
    before += item.cost;
    meets = meets || shares.may_cut(item);
    if (before <= my_begin || begin >= my_end) return;
    const int64_t first = context.thread == 0 ? item.first_tile : shares.end_tile(item, begin, context.thread - 1);
    const Task next{item, begin, first, shares.end_tile(item, begin, context.thread)};
    if (next.first >= next.end) return;
    if (has_task) run(&next);
    task = next;
    has_task = true;
  });
  if (has_task) run(nullptr);
  if (meets) wait_for_all(*context.barrier);
  // Only a thread's last task can have a rest.
  if (has_task && task.first == task.item.first_tile && task.end < task.item.end_tile) {
    finish_task(op, context, shares, task, task.item.amx ? many.rows : few);
  }
}

inline void attend(const AttendOp& op, const Context& context) {
  switch (op.kv.format) {
    case KvFormat::f32:
      attend_with<F32Kv>(op, context);
      break;
    case KvFormat::f16:
      attend_with<F16Kv>(op, context);
      break;
    case KvFormat::bf16:
      attend_with<Bf16Kv>(op, context);
      break;
    case KvFormat::i8:
      attend_with<I8Kv>(op, context);
      break;
    case KvFormat::e4m3:
      attend_with<E4m3Kv>(op, context);
      break;
    case KvFormat::e5m2:
      attend_with<E5m2Kv>(op, context);
      break;
  }
  if (!writes_late(op)) return;
  wait_for_all(*context.barrier);
  const int64_t width = op.num_heads * op.kv.head_size;
  const Range mine = share(context.step->num_tokens, context);
  for (int64_t t = mine.begin; t < mine.end; ++t) write_columns(op.out, t, 0, width, op.q + t * op.stride);
}

QUIRE_OP(attend, AttendOp, q, stride, out, num_heads, window, scale, kv, soft_cap, sinks)

}  // namespace
}  // namespace quire
