// Python's view of the memory that ranks share: an address in, which the caller keeps mapped.
#include <nanobind/nanobind.h>

#include "ranks/channel.h"
#include "ranks/exchange.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

void bind_ranks(nb::module_& m) {
  nb::class_<Exchange>(m, "Exchange", "One rank's view of the memory that ranks share; see native/ranks/exchange.h.")
      .def(
          "__init__",
          [](Exchange* self, uintptr_t memory, int32_t rank, int32_t num_ranks, int32_t num_threads,
             int32_t num_spins) {
            if (rank < 0 || rank >= num_ranks || num_ranks < 2 || num_threads < 1)
              throw nb::value_error("no such rank");
            if (num_ranks > kMostRanks) throw nb::value_error("at most 64 ranks");
            new (self) Exchange{reinterpret_cast<std::byte*>(memory), rank, num_ranks, num_threads, num_spins};
          },
          "memory"_a, "rank"_a, "num_ranks"_a, "num_threads"_a, "num_spins"_a)
      .def_ro("rank", &Exchange::rank)
      .def_ro("num_ranks", &Exchange::num_ranks)
      .def_ro("num_threads", &Exchange::num_threads)
      .def_prop_ro("address", [](const Exchange& self) { return reinterpret_cast<uintptr_t>(&self); })
      .def_prop_ro("bytes_sent", &bytes_sent, "Bytes that this rank has given to collectives; read between steps.")
      .def_prop_ro("has_given_up", &has_given_up, "True when a rank is lost: no call waits any more.")
      .def(
          "give_up", [](const Exchange& self) { give_up(self); }, "End all waiting, on every rank.")
      .def(
          "broadcast",
          [](const Exchange& self, uintptr_t values, int64_t count) {
            nb::gil_scoped_release release;
            return broadcast(self, reinterpret_cast<int32_t*>(values), count);
          },
          "values"_a, "count"_a, "Rank 0's int32 values become those of all ranks; False if the ranks have given up.");
  nb::class_<Channel>(m, "Channel",
                      "One side's view of memory through which a rank sends rows; native/ranks/channel.h.")
      .def(
          "__init__",
          [](Channel* self, uintptr_t memory, int32_t num_spins) {
            new (self) Channel{reinterpret_cast<std::byte*>(memory), num_spins};
          },
          "memory"_a, "num_spins"_a)
      .def(
          "give_up", [](const Channel& self) { give_up(self); }, "End all waiting, on both sides.")
      .def(
          "send",
          [](const Channel& self, uintptr_t rows, int64_t num_rows, int64_t row_bytes, int64_t stride) {
            nb::gil_scoped_release release;
            return send_rows(self, reinterpret_cast<const std::byte*>(rows), num_rows, row_bytes, stride);
          },
          "rows"_a, "num_rows"_a, "row_bytes"_a, "stride"_a, "Send rows; False if the ranks have given up.")
      .def(
          "receive",
          [](const Channel& self, uintptr_t rows, int64_t num_rows, int64_t row_bytes, int64_t stride) {
            nb::gil_scoped_release release;
            return receive_rows(self, reinterpret_cast<std::byte*>(rows), num_rows, row_bytes, stride);
          },
          "rows"_a, "num_rows"_a, "row_bytes"_a, "stride"_a, "Wait for rows; False if the ranks have given up.");
  m.def("channel_bytes", &channel_bytes, "Bytes of a channel's memory.");
  m.def("exchange_bytes", &exchange_bytes, "num_ranks"_a, "num_threads"_a, "Bytes of the memory that ranks share.");
}

}  // namespace quire
