// Every op as one table. Each isa/<name>.cpp includes this and compiles its own copy with its own flags.
#pragma once
#include "isa/table.h"
#include "op_headers.h"  // written by CMake: all of ops/
#include "sampling/kernels.h"
#include "weights/quantize_blocks.h"

namespace quire {
namespace {

template <int kAt, int kEnd>
constexpr void collect_ops(OpTable& table) {
  if constexpr (kAt < kEnd) {
    if constexpr (OpAt<kAt>::kExists) table.ops[table.num_ops++] = OpAt<kAt>::make();
    collect_ops<kAt + 1, kEnd>(table);
  }
}

constexpr OpTable make_op_table(const char* isa) {
  OpTable table{isa, sampling::kKernels, quantize::kQuantizers, 0, {}};
  collect_ops<kFirstOp + 1, __COUNTER__>(table);
  return table;
}

}  // namespace
}  // namespace quire
