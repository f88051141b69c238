// Memory through which one rank sends rows to another: a stage of a pipeline to the next, and rank 0 its messages.
//
// Rows travel in pieces through a ring of slots. The sender waits only while all slots are full, so it may begin
// another step before the receiver has read the last one.
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

// One side's view. The memory begins as zeros.
struct Channel {
  std::byte* memory;
  int32_t num_spins;  // see Exchange
};

int64_t channel_bytes();

// Sends or receives `num_rows` rows of `row_bytes` bytes, `stride` bytes apart. False: the ranks have given up.
bool send_rows(const Channel& channel, const std::byte* rows, int64_t num_rows, int64_t row_bytes, int64_t stride);
bool receive_rows(const Channel& channel, std::byte* rows, int64_t num_rows, int64_t row_bytes, int64_t stride);

// Ends all waiting, now and later, on both sides.
void give_up(const Channel& channel);

}  // namespace quire
