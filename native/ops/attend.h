#pragma once
#include "plan/ops.h"
namespace quire {
namespace {
inline void attend(const AttendOp&, const Context&) {}
}  // namespace
}  // namespace quire
