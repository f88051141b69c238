// Memory that the ranks of a tensor-parallel group share, and how they wait for each other in it.
//
// A rank's thread exchanges values with the same thread of all other ranks, piece by piece: it writes its piece into
// its slot, publishes the piece's number, waits for the numbers of the others, and reads their slots. Each thread has
// two slots that take turns, so that one wait per piece is enough: a rank writes piece n + 2 over piece n only after
// all ranks have published n + 1, and a rank publishes n + 1 after it has read piece n.
//
// Nothing here is inline: ops of every instruction set call it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

constexpr int32_t kMostRanks = 64;
constexpr int64_t kSlotBytes = 128 << 10;
constexpr int64_t kSlotFloats = kSlotBytes / 4;

// One rank's view. The memory begins as zeros, and all ranks have equally many threads.
struct Exchange {
  std::byte* memory;
  int32_t rank, num_ranks, num_threads;
  int32_t num_spins;  // before the core is offered to others: none where there are more threads than cores
};

int64_t exchange_bytes(int64_t num_ranks, int64_t num_threads);

// The number of this thread's next piece.
uint32_t next_piece(const Exchange& exchange, int64_t thread);
std::byte* slot_of(const Exchange& exchange, int64_t rank, int64_t thread, uint32_t piece);
// Publishes this thread's piece of `bytes` bytes; returns when that of every rank is there. False: the ranks have given
// up.
bool meet(const Exchange& exchange, int64_t thread, uint32_t piece, int64_t bytes);
// Bytes of the pieces that this rank has published.
int64_t bytes_sent(const Exchange& exchange);

// Rank 0's values become those of all ranks. Calls of one rank come one after another. False: the ranks have given up.
bool broadcast(const Exchange& exchange, int32_t* values, int64_t count);

// Ends all waiting, now and later, on every rank.
void give_up(const Exchange& exchange);
bool has_given_up(const Exchange& exchange);

}  // namespace quire
