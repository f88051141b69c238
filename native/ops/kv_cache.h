// Where keys and values of a block lie.
#pragma once
#include "plan/types.h"

namespace quire {
namespace {

// First, naive layout: per head [2][B][D] of the format's values; to be replaced.
inline int64_t kv_value_bytes(KvFormat format) {
  return format == KvFormat::f32 ? 4 : format == KvFormat::i8 ? 1 : 2;
}

}  // namespace
}  // namespace quire
