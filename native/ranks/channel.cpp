#include "ranks/channel.h"

#include <algorithm>
#include <cstring>

#include "ranks/wait.h"

namespace quire {
namespace {

constexpr int64_t kPieceBytes = 128 << 10;
constexpr uint32_t kPieces = 64;
constexpr int32_t kSleepMicroseconds = 100'000;  // until a rank that sleeps looks whether the ranks have given up

// In this order: the word "given up"; the number of pieces sent; that of pieces received; slots.
uint32_t* word_at(const Channel& channel, int64_t index) {
  return reinterpret_cast<uint32_t*>(channel.memory + kLine * index);
}
std::byte* slot_of(const Channel& channel, uint32_t piece) {
  return channel.memory + 4096 + static_cast<int64_t>(piece % kPieces) * kPieceBytes;
}

bool wait_for(const Channel& channel, const uint32_t* word, uint32_t value) {
  return wait_for_word(word, value, word_at(channel, 0), channel.num_spins, kSleepMicroseconds);
}
void publish(uint32_t* word, uint32_t value) {
  write_word(word, value);
  wake(word);
}

// visit(slot, row, first, count) for parts of rows, in order; begin(piece) before the first of a piece and end(piece)
// behind its last. A piece has whole rows, or a part of one that is longer than a piece.
template <typename Begin, typename Copy, typename End>
bool for_pieces(const Channel& channel, uint32_t piece, int64_t num_rows, int64_t row_bytes, Begin begin, Copy copy,
                End end) {
  const int64_t per_piece = std::max<int64_t>(1, kPieceBytes / std::max<int64_t>(1, row_bytes));
  for (int64_t row = 0; row < num_rows; row += per_piece) {
    const int64_t rows = std::min(per_piece, num_rows - row);
    for (int64_t first = 0; first < row_bytes; first += kPieceBytes) {
      const int64_t bytes = std::min(kPieceBytes, row_bytes - first);
      if (!begin(piece)) return false;
      for (int64_t i = 0; i < rows; ++i) copy(slot_of(channel, piece) + i * bytes, row + i, first, bytes);
      end(++piece);
    }
  }
  return true;
}

}  // namespace

int64_t channel_bytes() { return 4096 + static_cast<int64_t>(kPieces) * kPieceBytes; }

bool send_rows(const Channel& channel, const std::byte* rows, int64_t num_rows, int64_t row_bytes, int64_t stride) {
  const uint32_t* received = word_at(channel, 2);
  uint32_t* sent = word_at(channel, 1);
  return for_pieces(
      channel, *sent, num_rows, row_bytes,
      [&](uint32_t piece) { return wait_for(channel, received, piece - kPieces + 1); },
      [&](std::byte* slot, int64_t row, int64_t first, int64_t bytes) {
        std::memcpy(slot, rows + row * stride + first, static_cast<size_t>(bytes));
      },
      [&](uint32_t number) { publish(sent, number); });
}

bool receive_rows(const Channel& channel, std::byte* rows, int64_t num_rows, int64_t row_bytes, int64_t stride) {
  const uint32_t* sent = word_at(channel, 1);
  uint32_t* received = word_at(channel, 2);
  return for_pieces(
      channel, *received, num_rows, row_bytes, [&](uint32_t piece) { return wait_for(channel, sent, piece + 1); },
      [&](const std::byte* slot, int64_t row, int64_t first, int64_t bytes) {
        std::memcpy(rows + row * stride + first, slot, static_cast<size_t>(bytes));
      },
      [&](uint32_t number) { publish(received, number); });
}

void give_up(const Channel& channel) {
  write_word(word_at(channel, 0), 1);
  for (int64_t word : {1, 2}) wake(word_at(channel, word));
}

}  // namespace quire
