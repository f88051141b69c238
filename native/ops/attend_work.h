// How a step's attention is cut into items, and which thread computes which.
//
// An item is some rows of one KV head of one request, over all the tiles that they see: up to kAttendRows rows and
// tiles of kTileTokens, or with AMX, of requests with many rows, more of both. Threads take equal shares of the whole
// cost in the order of items. An item that is a large part of a share may itself be cut between tiles; tiles' results
// are merged in order wherever they were computed, so that bits do not depend on any of this.
#pragma once
#include "ops/attend_state.h"
#include "plan/op.h"

namespace quire {

// Attention of each token to positions max(0, p - window + 1) … p of its request; window 0: all. The queries' memory
// may be overwritten. scale > 0. soft_cap: scores become soft_cap * tanh(scale * score / soft_cap); 0: they do not.
struct AttendOp {
  float* q;  // [T, H, D], f32, rows `stride` elements apart
  int64_t stride;
  Rows out;  // [T, H * D], any type
  int32_t num_heads;
  int64_t window;
  float scale;
  KvLayer kv;
  float soft_cap;
  const float* sinks;  // [H] scores of a position without a value, which every row sees; or null
};

namespace {

struct Item {
  int64_t request, head;
  int64_t first_row, num_rows;  // row i of a request's head: token i / (H / K), query head i % (H / K) of the group
  int64_t low, high;            // positions that some row sees
  int64_t first_tile, end_tile;
  int64_t cost, tile_cost;
  int64_t tile_tokens;
  bool amx;

  // Of results in memory: AMX computes blocks of 16.
  int64_t memory_rows() const { return amx ? (num_rows + 15) / 16 * 16 : num_rows; }
};

#if defined(QUIRE_TILES)
// Requests with fewer rows per KV head in a step are as fast without tile registers: memory binds both.
constexpr int64_t kFewestAmxRows = 16, kSegmentTokens = 1024;
constexpr int64_t kMostAmxHead = 512;  // wider heads have no room in the first half of scratch

inline bool takes_amx(const AttendOp& op, const Step& step, int64_t num_rows) {
  const bool widens_exactly = op.kv.format == KvFormat::bf16 || op.kv.format == KvFormat::i8;
  return step.allows_tiles && widens_exactly && num_rows >= kFewestAmxRows && op.kv.head_size <= kMostAmxHead;
}
#else
constexpr int64_t kSegmentTokens = kTileTokens;

inline bool takes_amx(const AttendOp&, const Step&, int64_t) { return false; }
#endif

// Rows of an item, as a thread's scratch has room for them.
inline int64_t most_amx_rows(const AttendOp& op) {
  return op.kv.head_size <= 128 ? kMostRows : op.kv.head_size <= 256 ? 96 : 32;
}

// Enough items for all threads to end together, of as many rows as can be: each reads all keys and values.
inline int64_t amx_rows(const AttendOp& op, const Context& context) {
  constexpr int64_t kItems = 6;
  const int64_t rows = context.step->num_tokens * op.num_heads / (kItems * context.num_threads) / 16 * 16;
  const int64_t most = most_amx_rows(op);
  return rows < 32 ? 32 : rows < most ? rows : most;
}

inline Item make_item(const AttendOp& op, const Step& step, int64_t request, int64_t first_row, int64_t most_rows) {
  const int64_t group = op.num_heads / op.kv.num_kv_heads, all_rows = step.counts[request] * group;
  Item item{request, 0, first_row, all_rows - first_row, 0, 0, 0, 0, 0, 0, kTileTokens, takes_amx(op, step, all_rows)};
  if (item.num_rows > most_rows) item.num_rows = most_rows;
  if (item.amx) item.tile_tokens = kSegmentTokens;
  const int64_t start = step.starts[request] + first_row / group - op.window + 1;
  item.low = op.window == 0 || start < 0 ? 0 : start;
  item.high = step.starts[request] + (first_row + item.num_rows - 1) / group + 1;
  item.first_tile = item.low / item.tile_tokens;
  item.end_tile = (item.high + item.tile_tokens - 1) / item.tile_tokens;
  // Reading keys and values costs about what four rows' arithmetic does, and an item what 32 tokens do. AMX takes a
  // sixth of the time for a row.
  item.cost = (item.high - item.low + 32) * (item.amx ? item.num_rows + 8 : 6 * (item.num_rows + 4));
  item.tile_cost = item.cost / (item.end_tile - item.first_tile);
  return item;
}

// Calls visit(item) for the items of all requests, or of their first heads only, in order.
template <class Visit>
void for_items(const AttendOp& op, const Context& context, int64_t num_heads, Visit visit) {
  const Step& step = *context.step;
  const int64_t group = op.num_heads / op.kv.num_kv_heads;
  for (int64_t request = 0; request < step.num_requests; ++request) {
    const int64_t num_rows = step.counts[request] * group;
    const int64_t most_rows = takes_amx(op, step, num_rows) ? amx_rows(op, context) : kAttendRows;
    Item item{};
    for (int64_t head = 0; head < num_heads; ++head) {
      for (int64_t row = 0; row < num_rows; row += most_rows) {
        // A decode's heads differ in nothing else.
        if (head == 0 || num_rows > most_rows) item = make_item(op, step, request, row, most_rows);
        item.head = head;
        visit(item);
      }
    }
  }
}

// The cost of a step and where each thread's share of it ends.
struct Shares {
  int64_t total;
  int64_t num_threads;
  int64_t stride;         // of AttendRows
  int64_t partial_bytes;  // a thread's memory for results of tiles

  int64_t end(int64_t thread) const { return total * (thread + 1) / num_threads; }
  bool may_cut(const Item& item) const {
    const int64_t tiles = item.end_tile - item.first_tile;
    return num_threads > 1 && tiles > 1 && item.cost * 8 * num_threads > total &&
           tiles * quire::partial_bytes(item.memory_rows(), stride) <= partial_bytes;
  }
  // The first tile after `thread`'s share, for an item before which there is a cost of `before`.
  int64_t end_tile(const Item& item, int64_t before, int64_t thread) const {
    const int64_t left = end(thread) - before;
    if (!may_cut(item)) return 2 * left >= item.cost ? item.end_tile : item.first_tile;
    if (thread + 1 == num_threads) return item.end_tile;
    const int64_t tile = item.first_tile + (2 * left + item.tile_cost) / (2 * item.tile_cost);
    return left <= 0 || tile < item.first_tile ? item.first_tile : tile > item.end_tile ? item.end_tile : tile;
  }
};

}  // namespace
}  // namespace quire
