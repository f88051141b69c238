// What each instruction set provides: the ops of plans, in one order for all sets, RMS norm for the eager model, and
// the sampler's kernels.
#pragma once
#include <cstring>

#include "plan/op.h"
#include "sampling/table.h"

namespace quire {

using bfloat16_bits = uint16_t;

// out[r] = x[r] * rsqrt(mean(x[r]^2) + epsilon) * weight; see ops/rms_norm.h for the rounding.
template <typename T>
using RmsNorm = void (*)(const T* x, const T* weight, T* out, int64_t num_rows, int64_t width, float epsilon);

struct OpTable {
  const char* isa;
  RmsNorm<float> rms_norm_float32;
  RmsNorm<bfloat16_bits> rms_norm_bfloat16;
  SamplingKernels sampling;
  int32_t num_ops;
  Op ops[kMostOps];
};

extern const OpTable scalar_ops;
#ifdef QUIRE_X86
extern const OpTable avx2_ops;
extern const OpTable avx512_ops;
extern const OpTable avx512_bf16_ops;
extern const OpTable amx_emulated_ops;  // for tests
#ifdef QUIRE_AMX
extern const OpTable amx_ops;
#endif
#endif

}  // namespace quire
