// Addresses, which Python gives as integers.
#pragma once
#include <cstdint>

namespace quire {

using Address = uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace quire
