// Python's view of packing: addresses and sizes in. The caller keeps the memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "weights/pack.h"
#include "weights/quantize.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
void bind_weights(nb::module_& m) {
  m.def("packed_bytes", &packed_bytes, "format"_a, "num_outputs"_a, "num_inputs"_a,
        "Bytes of a packed matrix, which must start at a multiple of 64 bytes.");
  nb::class_<PackedRows>(m, "PackedRows")
      .def(
          "__init__",
          [](PackedRows* job, const std::string& stored, uintptr_t rows, int64_t num_rows, int64_t num_inputs,
             int64_t row_stride_bytes, uintptr_t packed, int64_t first_output, WeightFormat target,
             uintptr_t row_order) {
            new (job) PackedRows{.stored = stored,
                                 .rows = reinterpret_cast<const std::byte*>(rows),
                                 .row_stride_bytes = row_stride_bytes,
                                 .row_order = reinterpret_cast<const int32_t*>(row_order),
                                 .num_rows = num_rows,
                                 .num_inputs = num_inputs,
                                 .target = target,
                                 .packed = reinterpret_cast<std::byte*>(packed),
                                 .first_output = first_output};
          },
          "stored"_a, "rows"_a, "num_rows"_a, "num_inputs"_a, "row_stride_bytes"_a, "packed"_a, "first_output"_a,
          "target"_a, "row_order"_a = 0,
          "Rows stored in a GGUF format, to be packed as outputs first_output and following of the matrix at "
          "`packed`.\n"
          "row_order: address of int32 row numbers, or 0 for rows as they come.");
  m.def("pack_rows", &pack_rows, "jobs"_a, "num_threads"_a = 1, nb::call_guard<nb::gil_scoped_release>(),
        "Pack the rows of all jobs; see native/weights/pack.h.");
  m.def(
      "quantize_rows",
      [](const std::string& format, uintptr_t rows, int64_t num_rows, int64_t num_inputs, uintptr_t out,
         uintptr_t importance, int num_threads) {
        const QuantizedRows job{.format = format,
                                .rows = reinterpret_cast<const float*>(rows),
                                .importance = reinterpret_cast<const float*>(importance),
                                .num_rows = num_rows,
                                .num_inputs = num_inputs,
                                .out = reinterpret_cast<std::byte*>(out)};
        nb::gil_scoped_release release;
        quantize_rows(job, num_threads);
      },
      "format"_a, "rows"_a, "num_rows"_a, "num_inputs"_a, "out"_a, "importance"_a = 0, "num_threads"_a = 1,
      "Quantise fp32 rows to the blocks of a GGUF format at `out`; see native/weights/quantize.h. importance: address\n"
      "of one fp32 weight per column, or 0.");
}

}  // namespace quire
