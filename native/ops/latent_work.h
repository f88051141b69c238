// The two forms of latent attention (MLA: DeepSeek-V2, arXiv 2405.04434, sec. 2.1), and which one costs less.
//
// A layer caches per token a latent c of R values and a rotary key of C values that all heads share. Head h has keys
// U_h c (N values) and values V_h c (M values), so that
//   plain      expands keys and values of every position, then attends with U + C and O values per head
//   absorbed   multiplies queries by U_h and results by V_h instead, and attends to the latents themselves: one KV head
//              with keys of R + C values, the first R of which are its values
#pragma once
#include <cstdint>

namespace quire {

struct LatentSizes {
  int64_t rank, rotary, nope, value;  // R, C, U, O
};

struct LatentCost {
  int64_t absorbed, plain;  // FLOPs of one head
  bool is_plain() const { return plain < absorbed; }
};

// The cost of one request's new tokens, `count` from position `start` on. The form is chosen for each request by these
// two numbers alone, so that it does not depend on other requests.
inline LatentCost latent_cost(int64_t start, int64_t count, const LatentSizes& sizes) {
  const int64_t scores = count * start + count * (count + 1) / 2, up = sizes.rank * (sizes.nope + sizes.value);
  return {2 * (count * up + scores * (2 * sizes.rank + sizes.rotary)),
          2 * ((start + count) * up + scores * (sizes.nope + sizes.rotary + sizes.value))};
}

}  // namespace quire
