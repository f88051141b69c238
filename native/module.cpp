// Python binding of the native ops: chooses an instruction set at import, takes raw addresses.
//
// QUIRE_ISA=scalar|avx2|avx512|avx512_bf16 overrides the choice. Where the processor lacks that set, the best one it has is used
// and `requested_isa_missing` says so: a wrong setting must not keep the engine from starting.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdlib>
#include <string>

#include "isa/table.h"

namespace nb = nanobind;

namespace quire {
void bind_plan(nb::module_& m);      // plan/bindings.cpp
void bind_sampling(nb::module_& m);  // sampling/bindings.cpp
void bind_weights(nb::module_& m);  // weights/bindings.cpp
extern const OpTable* chosen_ops;
}  // namespace quire

namespace {

const quire::OpTable* supported(const std::string& isa) {
  if (isa == "scalar") return &quire::scalar_ops;
#ifdef QUIRE_X86
  if (isa == "avx2" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &quire::avx2_ops;
  if (isa == "avx512" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni")) {
    return &quire::avx512_ops;
  }
  if (isa == "avx512_bf16" && supported("avx512") && __builtin_cpu_supports("avx512bf16")) {
    return &quire::avx512_bf16_ops;
  }
#endif
  return nullptr;
}

const quire::OpTable* best() {
  for (const char* isa : {"avx512_bf16", "avx512", "avx2"}) {
    if (const quire::OpTable* table = supported(isa)) return table;
  }
  return &quire::scalar_ops;
}

template <typename T>
void call(quire::RmsNorm<T> op, uintptr_t x, uintptr_t weight, uintptr_t out, int64_t num_rows, int64_t width,
          float epsilon) {
  nb::gil_scoped_release release;
  op(reinterpret_cast<const T*>(x), reinterpret_cast<const T*>(weight), reinterpret_cast<T*>(out), num_rows, width,
     epsilon);
}

}  // namespace

namespace quire {
const OpTable* chosen_ops = best();
}  // namespace quire

NB_MODULE(_native, m) {
  m.doc() = "Quire's native CPU ops. Addresses are `tensor.data_ptr()` of contiguous tensors.";
  bool missing = false;
  if (const char* wanted = std::getenv("QUIRE_ISA"); wanted != nullptr && *wanted != '\0') {
    const quire::OpTable* table = supported(wanted);
    missing = table == nullptr;
    if (table != nullptr) quire::chosen_ops = table;
  }
  m.attr("requested_isa_missing") = missing;
  m.def("isa", [] { return std::string(quire::chosen_ops->isa); }, "The instruction set in use.");
  m.def(
      "isa_supported", [](const std::string& isa) { return supported(isa) != nullptr; }, nb::arg("isa"),
      "Whether this processor has the instruction set.");
  m.def(
      "set_isa",
      [](const std::string& isa) {
        const quire::OpTable* table = supported(isa);
        if (table == nullptr) throw nb::value_error(("this processor lacks " + isa).c_str());
        quire::chosen_ops = table;
      },
      nb::arg("isa"), "Switch the instruction set; for tests.");
  quire::bind_plan(m);
  quire::bind_sampling(m);
  quire::bind_weights(m);
  m.def("rms_norm_float32",
        [](uintptr_t x, uintptr_t weight, uintptr_t out, int64_t num_rows, int64_t width, float epsilon) {
          call(quire::chosen_ops->rms_norm_float32, x, weight, out, num_rows, width, epsilon);
        });
  m.def("rms_norm_bfloat16",
        [](uintptr_t x, uintptr_t weight, uintptr_t out, int64_t num_rows, int64_t width, float epsilon) {
          call(quire::chosen_ops->rms_norm_bfloat16, x, weight, out, num_rows, width, epsilon);
        });
}
