// How an op makes itself known. A header in native/ops/ defines the op's parameters, a struct, and a function
// `void op(const SomeOp&, const Context&)` that computes its thread's share; QUIRE_OP registers both. No other file
// names the op: CMake lists the headers, and Python calls it as a method of `Plan` with the struct's fields.
//
// What one op writes, another may read only after the barrier between them. An op's result for one token must not
// depend on the other tokens of the step, nor on the number of threads.
#pragma once
#include <type_traits>

#include "plan/types.h"

namespace quire {

// A field of an op's parameters, and how Python gives it.
enum class FieldKind : int32_t { address, integer, number, flag, activation, rows, weight, kv_layer, kv_ahead };
struct Field {
  const char* name;
  FieldKind kind;
  int32_t offset, size;
};

template <typename T>
constexpr FieldKind kind_of() {
  if constexpr (std::is_pointer_v<T>) {
    return FieldKind::address;
  } else if constexpr (std::is_same_v<T, bool>) {
    return FieldKind::flag;
  } else if constexpr (std::is_same_v<T, Activation>) {
    return FieldKind::activation;
  } else if constexpr (std::is_same_v<T, Rows>) {
    return FieldKind::rows;
  } else if constexpr (std::is_same_v<T, Weight>) {
    return FieldKind::weight;
  } else if constexpr (std::is_same_v<T, KvLayer>) {
    return FieldKind::kv_layer;
  } else if constexpr (std::is_same_v<T, KvAhead>) {
    return FieldKind::kv_ahead;
  } else if constexpr (std::is_floating_point_v<T>) {
    return FieldKind::number;
  } else {
    static_assert(std::is_integral_v<T>, "Python cannot give a field of this type");
    return FieldKind::integer;
  }
}

constexpr int32_t kMostFields = 16;
constexpr int64_t kMaxParams = 256;  // bytes

struct Op {
  const char* name;
  void (*run)(const void* params, const Context& context);
  int32_t size, num_fields;
  Field fields[kMostFields];
};

// Calls M(a) for each further argument.
#define QUIRE_EXPAND(...) QUIRE_EXPAND2(QUIRE_EXPAND2(QUIRE_EXPAND2(__VA_ARGS__)))
#define QUIRE_EXPAND2(...) QUIRE_EXPAND1(QUIRE_EXPAND1(QUIRE_EXPAND1(QUIRE_EXPAND1(__VA_ARGS__))))
#define QUIRE_EXPAND1(...) __VA_ARGS__
#define QUIRE_PARENS ()
#define QUIRE_EACH(M, P, ...) __VA_OPT__(QUIRE_EXPAND(QUIRE_EACH1(M, P, __VA_ARGS__)))
#define QUIRE_EACH1(M, P, a, ...) M(P, a) __VA_OPT__(QUIRE_EACH2 QUIRE_PARENS(M, P, __VA_ARGS__))
#define QUIRE_EACH2() QUIRE_EACH1

#define QUIRE_FIELD(Params, field) \
  {#field, kind_of<decltype(Params::field)>(), offsetof(Params, field), sizeof(Params::field)},

namespace {
// The op registered as number kAt, if there is one.
template <int kAt>
struct OpAt {
  static constexpr bool kExists = false;
};
constexpr int kFirstOp = __COUNTER__;
}  // namespace

// `fields`: those of the struct, in the order of positional arguments. Fields that Python leaves out are zero.
#define QUIRE_OP(name_, Params, ...)                                                                                 \
  static_assert(sizeof(Params) <= kMaxParams && std::is_trivially_copyable_v<Params>);                               \
  template <>                                                                                                        \
  struct OpAt<__COUNTER__> {                                                                                         \
    static constexpr bool kExists = true;                                                                            \
    static constexpr Field kFields[] = {QUIRE_EACH(QUIRE_FIELD, Params, __VA_ARGS__)};                               \
    static constexpr Op make() {                                                                                     \
      Op op{#name_,                                                                                                  \
            [](const void* params, const Context& context) { name_(*static_cast<const Params*>(params), context); }, \
            sizeof(Params),                                                                                          \
            sizeof kFields / sizeof kFields[0],                                                                      \
            {}};                                                                                                     \
      for (int32_t i = 0; i < op.num_fields; ++i) op.fields[i] = kFields[i];                                         \
      return op;                                                                                                     \
    }                                                                                                                \
  };

}  // namespace quire
