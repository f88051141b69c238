// What each instruction set provides: the ops of plans, in one order for all sets, the sampler's kernels and
// the quantisers.
#pragma once
#include <cstring>

#include "plan/op.h"
#include "sampling/table.h"
#include "weights/quantize_table.h"

namespace quire {

struct OpTable {
  const char* isa;
  SamplingKernels sampling;
  const BlockQuantizer* quantizers;  // [kNumQuantizers]
  int32_t num_ops;
  Op ops[kMostOps];
};

static inline bool has_tiles(const OpTable& ops) { return std::strncmp(ops.isa, "amx", 3) == 0; }

extern const OpTable scalar_ops;
#ifdef QUIRE_X86
extern const OpTable avx2_ops;
#ifdef QUIRE_AVX_VNNI
extern const OpTable avx_vnni_ops;
#endif
extern const OpTable avx512_ops;
extern const OpTable avx512_bf16_ops;
extern const OpTable amx_emulated_ops;  // for tests
#ifdef QUIRE_AMX
extern const OpTable amx_ops;
#endif
#endif

}  // namespace quire
