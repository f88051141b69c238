// Python's view of sampling: options per request as objects, rows of logits and results as addresses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "address.h"
#include "sampling/sampler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

template <Ids RowOptions::* kList>
void set_ids(RowOptions& self, Address ids, int64_t count) {
  self.*kList = {at<int64_t>(ids), nullptr, count};
}

template <Ids RowOptions::* kList>
void set_values(RowOptions& self, Address ids, Address values, int64_t count) {
  self.*kList = {at<int64_t>(ids), at<float>(values), count};
}

std::vector<const RowOptions*> options_of(nb::list rows) {
  std::vector<const RowOptions*> options;
  options.reserve(rows.size());
  for (nb::handle row : rows) options.push_back(nb::cast<const RowOptions*>(row));
  return options;
}

void sample(Sampler& self, Address logits, int64_t stride, nb::list rows, Address token_ids, Address logprobs,
            Address ranks, Address top_ids, Address top_logprobs, int64_t top_stride) {
  const std::vector<const RowOptions*> options = options_of(rows);
  for (const RowOptions* row : options) {
    if (row->num_top > top_stride) throw nb::value_error("num_top is larger than a row of results");
  }
  nb::gil_scoped_release release;
  self.sample({at<float>(logits), stride, static_cast<int64_t>(options.size()), at<int32_t>(token_ids),
               at<float>(logprobs), at<int64_t>(ranks), at<int32_t>(top_ids), at<float>(top_logprobs), top_stride},
              options);
}

bool merge_best(Sampler& self, Address logits, int64_t stride, int64_t count, int64_t first_id, Address sizes,
                int64_t num_rows, const Exchange& exchange, Address keys) {
  nb::gil_scoped_release release;
  return self.merge_best({at<float>(logits), stride, count, num_rows, first_id, at<int64_t>(sizes)}, exchange,
                         at<uint64_t>(keys));
}

void sample_best(Sampler& self, Address keys, Address num_keys, nb::list rows, Address token_ids) {
  const std::vector<const RowOptions*> options = options_of(rows);
  nb::gil_scoped_release release;
  self.sample_best(at<uint64_t>(keys), at<int64_t>(num_keys), options, at<int32_t>(token_ids));
}

void logprobs(Sampler& self, Address logits, int64_t stride, int64_t count, Address token_ids, Address logprobs,
              Address ranks, Address top_ids, Address top_logprobs, int64_t num_top) {
  nb::gil_scoped_release release;
  self.logprobs({at<float>(logits), stride, count, at<int32_t>(token_ids), at<float>(logprobs), at<int64_t>(ranks),
                 at<int32_t>(top_ids), at<float>(top_logprobs), num_top},
                num_top);
}

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::class_<RowOptions>(m, "RowOptions", "What one row of logits wants; see native/sampling/row.h.")
      .def(nb::init<>())
      .def_rw("temperature", &RowOptions::temperature)
      .def_rw("min_p", &RowOptions::min_p)
      .def_rw("top_p", &RowOptions::top_p)
      .def_rw("top_k", &RowOptions::top_k)
      .def_rw("seed", &RowOptions::seed)
      .def_rw("position", &RowOptions::position)
      .def_rw("repetition_penalty", &RowOptions::repetition_penalty)
      .def_rw("frequency_penalty", &RowOptions::frequency_penalty)
      .def_rw("presence_penalty", &RowOptions::presence_penalty)
      .def_rw("wants_logprobs", &RowOptions::wants_logprobs)
      .def_rw("num_top", &RowOptions::num_top)
      .def("allow", &set_ids<&RowOptions::allowed>, "ids"_a, "count"_a)
      .def("ban", &set_ids<&RowOptions::banned>, "ids"_a, "count"_a)
      .def("bias", &set_values<&RowOptions::bias>, "ids"_a, "values"_a, "count"_a)
      .def("penalise", &set_values<&RowOptions::penalised>, "ids"_a, "times"_a, "count"_a);
  nb::class_<Sampler>(m, "Sampler", "Rows of logits to tokens on a pool's threads; see native/sampling/sampler.h.")
      .def(nb::init<int64_t, std::shared_ptr<ThreadPool>>(), "vocab_size"_a, "pool"_a.none())
      .def("sample", &sample, "logits"_a, "stride"_a, "rows"_a, "token_ids"_a, "logprobs"_a = 0, "ranks"_a = 0,
           "top_ids"_a = 0, "top_logprobs"_a = 0, "top_stride"_a = 0,
           "Choose a token for each row of fp32 logits; -1 where they leave no choice.")
      .def("merge_best", &merge_best, "logits"_a, "stride"_a, "count"_a, "first_id"_a, "sizes"_a, "num_rows"_a,
           "exchange"_a, "keys"_a,
           "Give rank 0 the keys of the largest logits of all ranks' shares; False if the ranks have given up.")
      .def("sample_best", &sample_best, "keys"_a, "num_keys"_a, "rows"_a, "token_ids"_a,
           "Choose a token for each row of merged keys; -1 where they leave no choice.")
      .def("logprobs", &logprobs, "logits"_a, "stride"_a, "count"_a, "token_ids"_a, "logprobs"_a, "ranks"_a,
           "top_ids"_a, "top_logprobs"_a, "num_top"_a, "Log-probabilities of given tokens, one per row of logits.");
}

}  // namespace quire
