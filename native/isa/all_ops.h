// Every op as one table. Each isa/<name>.cpp includes this and compiles its own copy with its own flags.
#pragma once
#include "isa/table.h"
#include "ops/activate.h"
#include "ops/attend.h"
#include "ops/embed.h"
#include "ops/gemm.h"
#include "ops/head.h"
#include "ops/norm.h"
#include "ops/rms_norm.h"
#include "ops/rotary.h"
#include "ops/write_kv.h"
#include "sampling/kernels.h"

namespace quire {
namespace {

constexpr OpTable make_op_table(const char* isa) {
  return {
      .isa = isa,
      .rms_norm_float32 = rms_norm<float>,
      .rms_norm_bfloat16 = rms_norm<bfloat16_bits>,
#define QUIRE_OP_POINTER(name, Params) .name = name,
      QUIRE_OPS(QUIRE_OP_POINTER)
#undef QUIRE_OP_POINTER
          .sampling = sampling::kKernels,
  };
}

}  // namespace
}  // namespace quire
