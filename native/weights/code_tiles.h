// Rows of codes (codes.h) to the quantised tiles of plan/types.h, one output in each lane of a vector. Next to read:
// pack.h.
#pragma once
#include <cstdint>

#include "weights/pack.h"

namespace quire {

// Outputs of a tile: those of lanes before the first one belong to other jobs, those from the end on become zero.
struct CodeTile {
  std::byte* tile;
  int64_t num_blocks;  // of an output
  int64_t first_lane, end_lane;
  int64_t rows[kTile];  // stored, by lane
  int64_t first_row;    // of scales and zeros: that of the first lane
};

// Packs all inputs of the outputs as `job` says: direct codes, or codes as q8.
void pack_codes(const PackedRows& job, const CodeTile& to);

}  // namespace quire
