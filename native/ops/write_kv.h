#pragma once
#include "plan/ops.h"
namespace quire {
namespace {
inline void write_kv(const WriteKvOp&, const Context&) {}
}  // namespace
}  // namespace quire
