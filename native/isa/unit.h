// The end of each unit of an instruction set: the ops of the headers before this one, as an OpUnit.
//
// CMake writes the sources of units, and compiles them with their set's flags. A unit shows other objects nothing but
// its OpUnit (isa/simd.h says why).
#pragma once
#include "isa/table.h"

namespace quire {
namespace {

constexpr int kEndOfOps = __COUNTER__;

template <int kAt>
constexpr int32_t count_ops() {
  if constexpr (kAt < kEndOfOps) return OpAt<kAt>::kExists + count_ops<kAt + 1>();
  return 0;
}
constexpr int32_t kNumOps = count_ops<kFirstOp + 1>();

struct OpList {
  Op ops[kNumOps > 0 ? kNumOps : 1];
};
template <int kAt>
constexpr void collect_ops(Op* to) {
  if constexpr (kAt < kEndOfOps) {
    if constexpr (OpAt<kAt>::kExists) *to++ = OpAt<kAt>::make();
    collect_ops<kAt + 1>(to);
  }
}
constexpr OpList make_op_list() {
  OpList list{};
  collect_ops<kFirstOp + 1>(list.ops);
  return list;
}
constinit const OpList kOps = make_op_list();

constexpr OpUnit make_unit(const SamplingKernels* sampling = nullptr, const BlockQuantizer* quantizers = nullptr) {
  return {sampling, quantizers, kNumOps, kOps.ops};
}

}  // namespace
}  // namespace quire
