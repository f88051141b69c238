// How a step's attention is cut into items, and which thread computes which.
//
// An item is up to kAttendRows rows of one KV head of one request, over all the tiles that they see. Threads take equal
// shares of the whole cost in the order of items. An item that is a large part of a share may itself be cut between
// tiles; tiles' results are merged in order wherever they were computed, so that bits do not depend on any of this.
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
};

inline Item make_item(const AttendOp& op, const Step& step, int64_t request, int64_t first_row) {
  const int64_t group = op.num_heads / op.kv.num_kv_heads, all_rows = step.counts[request] * group;
  Item item{request, 0, first_row, all_rows - first_row, 0, 0, 0, 0, 0, 0};
  if (item.num_rows > kAttendRows) item.num_rows = kAttendRows;
  const int64_t start = step.starts[request] + first_row / group - op.window + 1;
  item.low = op.window == 0 || start < 0 ? 0 : start;
  item.high = step.starts[request] + (first_row + item.num_rows - 1) / group + 1;
  item.first_tile = item.low / kTileTokens;
  item.end_tile = (item.high + kTileTokens - 1) / kTileTokens;
  // Reading keys and values costs about what four rows' arithmetic does, and an item what 32 tokens do.
  item.cost = (item.high - item.low + 32) * (item.num_rows + 4);
  item.tile_cost = item.cost / (item.end_tile - item.first_tile);
  return item;
}

// Calls visit(item) for the items of all requests, or of their first heads only, in order.
template <class Visit>
void for_items(const AttendOp& op, const Step& step, int64_t num_heads, Visit visit) {
  const int64_t group = op.num_heads / op.kv.num_kv_heads;
  for (int64_t request = 0; request < step.num_requests; ++request) {
    const int64_t num_rows = step.counts[request] * group;
    Item item{};
    for (int64_t head = 0; head < num_heads; ++head) {
      for (int64_t row = 0; row < num_rows; row += kAttendRows) {
        // A decode's heads differ in nothing else.
        if (head == 0 || num_rows > kAttendRows) item = make_item(op, step, request, row);
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
           tiles * quire::partial_bytes(item.num_rows, stride) <= partial_bytes;
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
