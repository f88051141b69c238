// Python's view of packing: addresses and sizes in. The caller keeps the memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "weights/bus_error.h"
#include "weights/decode.h"
#include "weights/pack.h"
#include "weights/quantize.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

// Strings of GGUF, each of 8 bytes with its length and then its bytes: at most `count`, up to the first one that is cut
// off, longer than most_bytes, or not UTF-8. Returns them, and how many bytes they take.
nb::tuple read_strings(uintptr_t data, uint64_t num_bytes, int64_t count, uint64_t most_bytes) {
  const char* bytes = reinterpret_cast<const char*>(data);
  uint64_t at = 0, length;
  nb::list found;
  for (; count > 0 && num_bytes - at >= sizeof length; --count) {
    std::memcpy(&length, bytes + at, sizeof length);
    if (length > most_bytes || length > num_bytes - at - sizeof length) break;
    PyObject* text = PyUnicode_DecodeUTF8(bytes + at + sizeof length, static_cast<Py_ssize_t>(length), nullptr);
    if (text == nullptr) {
      if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) throw nb::python_error();
      PyErr_Clear();
      break;
    }
    found.append(nb::steal(text));
    at += sizeof length + length;
  }
  return nb::make_tuple(found, at);
}

}  // namespace

void bind_weights(nb::module_& m) {
  m.def("explain_bus_errors", &explain_bus_errors,
        "Tell on stderr which mapped file cannot be read, before the process dies of SIGBUS.");
  m.def("read_strings", &read_strings, "data"_a, "num_bytes"_a, "count"_a, "most_bytes"_a,
        "Strings of GGUF up to the first bad one, and their bytes.");
  m.def("packed_bytes", &packed_bytes, "format"_a, "num_outputs"_a, "num_inputs"_a,
        "Bytes of a packed matrix, which must start at a multiple of 64 bytes.");
  nb::enum_<CodeLayout>(m, "CodeLayout")
      .value("across4", CodeLayout::across4)
      .value("across8", CodeLayout::across8)
      .value("down4", CodeLayout::down4)
      .value("down8", CodeLayout::down8)
      .value("awq", CodeLayout::awq)
      .value("nvfp4", CodeLayout::nvfp4)
      .value("nvfp4_scales", CodeLayout::nvfp4_scales);
  m.def(
      "unpack_codes",
      [](CodeLayout layout, uintptr_t data, int64_t stride_bytes, uintptr_t rows, int64_t num_rows, int64_t first,
         int64_t count, uintptr_t out) {
        unpack_codes({layout, reinterpret_cast<const std::byte*>(data), stride_bytes},
                     reinterpret_cast<const int64_t*>(rows), num_rows, first, count, reinterpret_cast<uint8_t*>(out),
                     count);
      },
      "layout"_a, "data"_a, "stride_bytes"_a, "rows"_a, "num_rows"_a, "first"_a, "count"_a, "out"_a,
      nb::call_guard<nb::gil_scoped_release>(),
      "Write the codes of int64 `rows` and `count` columns from `first` on, a byte each; see native/weights/codes.h.");
  nb::class_<PackedRows> packed_rows(m, "PackedRows");
  packed_rows
      .def(
          "__init__",
          [](PackedRows* job, const std::string& stored, uintptr_t rows, int64_t num_rows, int64_t num_inputs,
             int64_t row_stride_bytes, uintptr_t packed, int64_t first_output, WeightFormat target, uintptr_t row_order,
             uintptr_t codebook) {
            new (job) PackedRows{.stored = stored,
                                 .rows = reinterpret_cast<const std::byte*>(rows),
                                 .row_stride_bytes = row_stride_bytes,
                                 .row_order = reinterpret_cast<const int32_t*>(row_order),
                                 .num_rows = num_rows,
                                 .num_inputs = num_inputs,
                                 .target = target,
                                 .packed = reinterpret_cast<std::byte*>(packed),
                                 .first_output = first_output,
                                 .codebook = reinterpret_cast<const int8_t*>(codebook),
                                 .codes = {}};
          },
          "stored"_a, "rows"_a, "num_rows"_a, "num_inputs"_a, "row_stride_bytes"_a, "packed"_a, "first_output"_a,
          "target"_a, "row_order"_a = 0, "codebook"_a = 0,
          "Rows stored in a GGUF format, to be packed as outputs first_output and following of the matrix at "
          "`packed`.\n"
          "row_order: address of int32 row numbers, or 0 for rows as they come. codebook: of IQ formats, address of\n"
          "the int8 entries.")
      .def(
          "set_codes",
          [](PackedRows& job, CodeLayout layout, uintptr_t data, int64_t stride_bytes, int64_t first_row,
             int64_t first_column, bool is_direct, uint8_t flipped) {
            job.codes.stored = {layout, reinterpret_cast<const std::byte*>(data), stride_bytes};
            job.codes.first_row = first_row;
            job.codes.first_column = first_column;
            job.codes.is_direct = is_direct;
            job.codes.flipped = flipped;
          },
          "layout"_a, "data"_a, "stride_bytes"_a, "first_row"_a, "first_column"_a, "is_direct"_a, "flipped"_a = 0,
          "Say where the codes of rows stored as CODES are, and whether they, XOR `flipped`, are those of the target.")
      .def(
          "set_groups",
          [](PackedRows& job, uintptr_t table, uintptr_t scales, uintptr_t zeros, uintptr_t groups,
             int64_t num_groups) {
            job.codes.table = reinterpret_cast<const float*>(table);
            job.codes.scales = reinterpret_cast<const float*>(scales);
            job.codes.zeros = reinterpret_cast<const float*>(zeros);
            job.codes.groups = reinterpret_cast<const int32_t*>(groups);
            job.codes.num_groups = num_groups;
          },
          "table"_a, "scales"_a, "zeros"_a, "groups"_a, "num_groups"_a,
          "Say what codes stand for: (table[code] - zero) * scale of the column's group, in fp32; scales and zeros\n"
          "[rows, num_groups], groups int32.")
      .def(
          "set_block_scales",
          [](PackedRows& job, CodeLayout layout, uintptr_t data, int64_t stride_bytes, float factor) {
            job.codes.block_scales = {layout, reinterpret_cast<const std::byte*>(data), stride_bytes};
            job.codes.factor = factor;
          },
          "layout"_a, "data"_a, "stride_bytes"_a, "factor"_a,
          "Say where the scales of MXFP4's and NVFP4's blocks are, and the factor of all of NVFP4's.");
  packed_rows
      .def_rw("whole_inputs", &PackedRows::whole_inputs,
              "Of floats that are rounded to E4M3 with a scale for each row: the inputs of a whole row.")
      .def_rw("first_input", &PackedRows::first_input, "Of these the first one that is packed.");
  m.def("pack_rows", &pack_rows, "jobs"_a, "num_threads"_a = 1, nb::call_guard<nb::gil_scoped_release>(),
        "Pack the rows of all jobs; see native/weights/pack.h.");
  m.def(
      "decode_blocks",
      [](const std::string& format, uintptr_t blocks, int64_t num_values, uintptr_t codebook, uintptr_t out) {
        const auto* from = reinterpret_cast<const std::byte*>(blocks);
        if (format == "F16") return decode_f16(from, num_values, reinterpret_cast<float*>(out));
        const BlockDecoder* decoder = find_decoder(format.c_str());
        if (decoder == nullptr) throw std::invalid_argument("no format of blocks: " + format);
        decode_blocks(*decoder, from, num_values, reinterpret_cast<const int8_t*>(codebook),
                      reinterpret_cast<float*>(out));
      },
      "format"_a, "blocks"_a, "num_values"_a, "codebook"_a, "out"_a, nb::call_guard<nb::gil_scoped_release>(),
      "Decode whole blocks of a GGUF format, or F16, to fp32. codebook: as of PackedRows.");
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
