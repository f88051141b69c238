// Every op as one table. Each isa/<name>.cpp includes this and compiles its own copy with its own flags.
#pragma once
#include "isa/table.h"
#include "ops/rms_norm.h"

namespace quire {
namespace {

constexpr OpTable make_op_table(const char* isa) {
  return {
      .isa = isa,
      .rms_norm_float32 = rms_norm<float>,
      .rms_norm_bfloat16 = rms_norm<bfloat16_bits>,
  };
}

}  // namespace
}  // namespace quire
