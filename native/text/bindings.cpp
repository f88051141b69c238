// Python's view of tokenizing with pieces.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>

#include "text/pieces.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

// The UTF-8 of a string, which keeps it.
std::string_view utf8(nb::handle text) {
  Py_ssize_t length;
  const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &length);
  if (bytes == nullptr) throw nb::python_error();
  return {bytes, static_cast<size_t>(length)};
}

}  // namespace

void bind_text(nb::module_& m) {
  nb::class_<Pieces>(m, "Pieces")
      .def(
          "__init__",
          [](Pieces* pieces, const nb::list& tokens, const nb::list& scores, const std::vector<int32_t>& matched,
             int32_t unknown, bool marks_start) {
            const size_t num_tokens = nb::len(tokens);
            if (nb::len(scores) != num_tokens) throw nb::value_error("not as many scores as tokens");
            PieceTable table(num_tokens);
            for (size_t id = 0; id < num_tokens; ++id)
              if (!table.add(utf8(tokens[id]), nb::cast<double>(scores[id])))
                throw nb::value_error("a token is there twice");
            new (pieces) Pieces(std::move(table), matched, unknown, marks_start);
          },
          "tokens"_a, "scores"_a, "matched"_a, "unknown"_a, "marks_start"_a, "See native/text/pieces.h.")
      .def(
          "set_merges",
          [](Pieces& pieces, const nb::list& lines) {
            std::vector<std::string_view> texts;
            texts.reserve(nb::len(lines));
            for (const nb::handle line : lines) texts.push_back(utf8(line));
            return pieces.set_merges(texts);
          },
          "lines"_a, "Make these the only merges; returns the number of the first bad one, or how many there are.")
      .def(
          "encode",
          [](const Pieces& pieces, const nb::str& text) {
            const std::string_view bytes = utf8(text);
            nb::gil_scoped_release release;
            return pieces.encode(bytes);
          },
          "text"_a, "Token ids of a text.")
      .def(
          "find", [](const Pieces& pieces, const nb::str& text) { return pieces.table().find(utf8(text)); }, "text"_a,
          "The id of a token, or -1.");
}

}  // namespace quire
