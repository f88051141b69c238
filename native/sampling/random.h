// Random numbers that are a pure function of (seed, position, attempt): Philox4x32-10, as in sampling/random.py.
#pragma once
#include <cstdint>

namespace quire {

// In [0, 1), with 53 random bits: the seed is the key; position and attempt are the counter.
inline double uniform(uint64_t seed, uint64_t position, uint32_t attempt) {
  uint32_t words[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), attempt, 0};
  uint32_t low_key = static_cast<uint32_t>(seed), high_key = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t{0xD2511F53} * words[0], right = uint64_t{0xCD9E8D57} * words[2];
    words[0] = static_cast<uint32_t>(right >> 32) ^ words[1] ^ low_key;
    words[1] = static_cast<uint32_t>(right);
    words[2] = static_cast<uint32_t>(left >> 32) ^ words[3] ^ high_key;
    words[3] = static_cast<uint32_t>(left);
    low_key += 0x9E3779B9u;
    high_key += 0xBB67AE85u;
  }
  const uint64_t bits = (static_cast<uint64_t>(words[0]) << 21) | (words[1] >> 11);
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace quire
