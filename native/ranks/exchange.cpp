#include "ranks/exchange.h"

#include <cstring>

#include "ranks/wait.h"

namespace quire {
namespace {

constexpr int64_t kBroadcastBytes = 64 << 10;

// In this order: the word "given up"; per rank the number of its last broadcast; per rank and thread that of its last
// piece; values of a broadcast; slots.
uint32_t* gave_up_word(const Exchange& e) { return reinterpret_cast<uint32_t*>(e.memory); }
uint32_t* broadcast_word(const Exchange& e, int64_t rank) {
  return reinterpret_cast<uint32_t*>(e.memory + kLine * (1 + rank));
}
uint32_t* piece_word(const Exchange& e, int64_t rank, int64_t thread) {
  return reinterpret_cast<uint32_t*>(e.memory + kLine * (1 + e.num_ranks + rank * e.num_threads + thread));
}
// Beside the thread's piece word, in a cache line that the thread writes with each piece anyway.
int64_t* bytes_word(const Exchange& e, int64_t thread) {
  return reinterpret_cast<int64_t*>(piece_word(e, e.rank, thread) + 2);
}
std::byte* broadcast_values(const Exchange& e) {
  const int64_t words = kLine * (1 + e.num_ranks + e.num_ranks * e.num_threads);
  return e.memory + (words + 4095) / 4096 * 4096;
}

bool wait_for(const Exchange& e, const uint32_t* word, uint32_t value) {
  return wait_for_word(word, value, gave_up_word(e), e.num_spins);
}

}  // namespace

int64_t exchange_bytes(int64_t num_ranks, int64_t num_threads) {
  const int64_t words = kLine * (1 + num_ranks + num_ranks * num_threads);
  return (words + 4095) / 4096 * 4096 + kBroadcastBytes + 2 * kSlotBytes * num_ranks * num_threads;
}

uint32_t next_piece(const Exchange& e, int64_t thread) { return *piece_word(e, e.rank, thread) + 1; }

std::byte* slot_of(const Exchange& e, int64_t rank, int64_t thread, uint32_t piece) {
  const int64_t slot = (rank * e.num_threads + thread) * 2 + piece % 2;
  return broadcast_values(e) + kBroadcastBytes + slot * kSlotBytes;
}

bool meet(const Exchange& e, int64_t thread, uint32_t piece, int64_t bytes) {
  *bytes_word(e, thread) += bytes;
  write_word(piece_word(e, e.rank, thread), piece);
  for (int64_t rank = 0; rank < e.num_ranks; ++rank) {
    if (rank != e.rank && !wait_for(e, piece_word(e, rank, thread), piece)) return false;
  }
  return true;
}

int64_t bytes_sent(const Exchange& e) {
  int64_t total = 0;
  for (int64_t thread = 0; thread < e.num_threads; ++thread) total += *bytes_word(e, thread);
  return total;
}

bool broadcast(const Exchange& e, int32_t* values, int64_t count) {
  constexpr int64_t kMost = kBroadcastBytes / 4;
  uint32_t* mine = broadcast_word(e, e.rank);
  for (int64_t first = 0; first < count; first += kMost) {
    const auto bytes = static_cast<size_t>(4 * (count - first < kMost ? count - first : kMost));
    const uint32_t number = *mine + 1;
    if (e.rank == 0) {
      // The others have read the last one.
      for (int64_t rank = 1; rank < e.num_ranks; ++rank) {
        if (!wait_for(e, broadcast_word(e, rank), number - 1)) return false;
      }
      std::memcpy(broadcast_values(e), values + first, bytes);
    } else {
      if (!wait_for(e, broadcast_word(e, 0), number)) return false;
      std::memcpy(values + first, broadcast_values(e), bytes);
    }
    write_word(mine, number);
  }
  return true;
}

void give_up(const Exchange& e) { write_word(gave_up_word(e), 1); }
bool has_given_up(const Exchange& e) { return read_word(gave_up_word(e)) != 0; }

}  // namespace quire
