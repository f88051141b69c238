// Python's view of the memory that ranks share: an address in, which the caller keeps mapped.
#include <nanobind/nanobind.h>

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
      .def_prop_ro("has_given_up", &has_given_up, "True when a rank is lost: no call waits any more.")
      .def("give_up", &give_up, "End all waiting, on every rank.")
      .def(
          "broadcast",
          [](const Exchange& self, uintptr_t values, int64_t count) {
            nb::gil_scoped_release release;
            return broadcast(self, reinterpret_cast<int32_t*>(values), count);
          },
          "values"_a, "count"_a, "Rank 0's int32 values become those of all ranks; False if the ranks have given up.");
  m.def("exchange_bytes", &exchange_bytes, "num_ranks"_a, "num_threads"_a, "Bytes of the memory that ranks share.");
}

}  // namespace quire
