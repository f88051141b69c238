// Python's view of plans: addresses and numbers in, one call per step. The caller keeps the memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "address.h"
#include "ops/kv_cache.h"
#include "ops/latent_work.h"
#include "plan/plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

Step make_step(int64_t num_requests, int64_t num_logit_rows, Address request_rows, Address starts, Address counts,
               Address logit_rows, Address tokens, int64_t tokens_stride, Address block_tables, int64_t table_stride,
               int64_t group_stride) {
  Step step{};
  step.num_requests = num_requests;
  step.num_logit_rows = num_logit_rows;
  step.request_rows = at<int32_t>(request_rows);
  step.starts = at<int32_t>(starts);
  step.counts = at<int32_t>(counts);
  step.logit_rows = at<int32_t>(logit_rows);
  step.tokens = at<int32_t>(tokens);
  step.tokens_stride = tokens_stride;
  step.block_tables = at<int32_t>(block_tables);
  step.table_stride = table_stride;
  step.group_stride = group_stride;
  return step;
}

void bind_values(nb::module_& m) {
  nb::enum_<RowType>(m, "RowType").value("f32", RowType::f32).value("bf16", RowType::bf16).value("q8", RowType::q8);
  nb::enum_<WeightFormat>(m, "WeightFormat")
      .value("f32", WeightFormat::f32)
      .value("f16", WeightFormat::f16)
      .value("bf16", WeightFormat::bf16)
      .value("q4", WeightFormat::q4)
      .value("q4m", WeightFormat::q4m)
      .value("q5", WeightFormat::q5)
      .value("q5m", WeightFormat::q5m)
      .value("q8", WeightFormat::q8)
      .value("q4k", WeightFormat::q4k)
      .value("q5k", WeightFormat::q5k)
      .value("q6k", WeightFormat::q6k)
      .value("iq4nl", WeightFormat::iq4nl)
      .value("iq4xs", WeightFormat::iq4xs)
      .value("mxfp4", WeightFormat::mxfp4)
      .value("nvfp4", WeightFormat::nvfp4);
  nb::enum_<KvFormat>(m, "KvFormat")
      .value("f32", KvFormat::f32)
      .value("f16", KvFormat::f16)
      .value("bf16", KvFormat::bf16)
      .value("i8", KvFormat::i8)
      .value("e4m3", KvFormat::e4m3)
      .value("e5m2", KvFormat::e5m2);
  nb::enum_<Activation>(m, "Activation")
      .value("none", Activation::none)
      .value("relu", Activation::relu)
      .value("gelu", Activation::gelu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("silu", Activation::silu)
      .value("relu2", Activation::relu2);
  nb::class_<Rows>(m, "Rows").def(
      "__init__",
      [](Rows* self, Address address, int64_t stride_bytes, RowType type) {
        new (self) Rows{at<std::byte>(address), stride_bytes, type};
      },
      "address"_a, "stride_bytes"_a, "type"_a);
  nb::class_<Weight>(m, "Weight")
      .def(
          "__init__",
          [](Weight* self, Address address, int64_t num_outputs, int64_t num_inputs, WeightFormat format,
             const Weight* next) {
            if (next != nullptr) {
              if (num_outputs % kBlock != 0) throw nb::value_error("a part's outputs are a multiple of 32");
              if (num_inputs != next->num_inputs || wanted_rows(format) != wanted_rows(next->format)) {
                throw nb::value_error("all parts have the same inputs and want the same rows");
              }
              num_outputs += next->num_outputs;
            }
            new (self) Weight{at<std::byte>(address), num_outputs, num_inputs, format, next};
          },
          nb::keep_alive<1, 6>(), "address"_a, "num_outputs"_a, "num_inputs"_a, "format"_a, "next"_a.none() = nullptr,
          "A packed matrix; `next`: the outputs after these, which the caller keeps alive.");
  nb::class_<KvLayer>(m, "KvLayer")
      .def(
          "__init__",
          [](KvLayer* self, Address base, int64_t block_stride_bytes, int32_t block_size, int32_t num_kv_heads,
             int32_t head_size, KvFormat format, int32_t group) {
            if (block_size <= 0 || block_size % 16 != 0) throw nb::value_error("a block size is a multiple of 16");
            if (head_size <= 0 || head_size % 2 != 0 || head_size > kMaxHeadSize) {
              throw nb::value_error("a head size is even and at most 576");
            }
            new (self)
                KvLayer{at<std::byte>(base), block_stride_bytes, block_size, num_kv_heads, head_size, format, group};
          },
          "base"_a, "block_stride_bytes"_a, "block_size"_a, "num_kv_heads"_a, "head_size"_a, "format"_a, "group"_a)
      .def_ro("format", &KvLayer::format);
  nb::class_<KvAhead>(m, "KvAhead")
      .def(
          "__init__",
          [](KvAhead* self, const KvLayer& kv, int64_t window, double begin, double end) {
            if (!(0 <= begin && begin <= end && end <= 1))
              throw nb::value_error("begin and end of a part are ascending and from 0 to 1");
            new (self) KvAhead{kv, window, begin, end};
          },
          "kv"_a, "window"_a, "begin"_a, "end"_a);
  m.def("has_tiles", [] { return has_tiles(*chosen_ops); }, "Whether the instruction set in use has tile registers.");
  m.def("tile_bytes", &tile_bytes, "format"_a, "num_inputs"_a, "Bytes of a packed tile of 16 outputs.");
  m.def("kv_layer_bytes", &kv_layer_bytes, "format"_a, "block_size"_a, "num_kv_heads"_a, "head_size"_a,
        "Bytes of one block of one layer of the KV pool.");
  m.def(
      "latent_cost",
      [](int64_t start, int64_t count, int64_t rank, int64_t rotary, int64_t nope, int64_t value) {
        const LatentCost cost = latent_cost(start, count, {rank, rotary, nope, value});
        return std::make_tuple(cost.is_plain(), cost.is_plain() ? cost.plain : cost.absorbed);
      },
      "start"_a, "count"_a, "rank"_a, "rotary_size"_a, "nope_size"_a, "value_size"_a,
      "Whether latent attention to a request's new tokens takes the plain form, and the FLOPs of one head.");
  m.def("wanted_rows", &wanted_rows, "format"_a, "The type of rows that a product with such a weight reads.");
}

template <typename T>
void put(const T& value, std::byte* to) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::memcpy(to, &value, sizeof value);
}

// A Python value as the bytes of a field.
void set_field(const Field& field, nb::handle value, std::byte* params) {
  std::byte* to = params + field.offset;
  switch (field.kind) {
    case FieldKind::address:
      return put(nb::cast<Address>(value), to);
    case FieldKind::integer:
      return field.size == 4 ? put(nb::cast<int32_t>(value), to) : put(nb::cast<int64_t>(value), to);
    case FieldKind::number:
      return field.size == 4 ? put(nb::cast<float>(value), to) : put(nb::cast<double>(value), to);
    case FieldKind::flag:
      return put(nb::cast<bool>(value), to);
    case FieldKind::activation:
      return put(nb::cast<Activation>(value), to);
    case FieldKind::rows:
      return put(nb::cast<Rows>(value), to);
    case FieldKind::weight:
      return put(nb::cast<Weight>(value), to);
    case FieldKind::kv_layer:
      return put(nb::cast<KvLayer>(value), to);
    case FieldKind::kv_ahead:
      if (!value.is_none()) put(nb::cast<KvAhead>(value), to);
  }
}

// A Python call of an op: its fields by position or by name, and `parts`.
void push_op(Plan& plan, size_t index, const nb::args& values, const nb::kwargs& named) {
  const Op& op = *chosen_ops->ops[index];
  alignas(16) std::byte params[kMaxParams] = {};
  uint32_t parts = 1;
  const auto set = [&](const Field& field, nb::handle value) {
    try {
      set_field(field, value, params);
    } catch (const std::bad_cast&) {
      throw nb::type_error((std::string(op.name) + "() takes no such value as " + field.name).c_str());
    }
  };
  if (values.size() > static_cast<size_t>(op.num_fields)) {
    throw nb::type_error((std::string(op.name) + "() has " + std::to_string(op.num_fields) + " fields").c_str());
  }
  for (size_t i = 0; i < values.size(); ++i) set(op.fields[i], values[i]);
  for (auto [key, value] : named) {
    const auto name = nb::cast<std::string>(key);
    const Field* end = op.fields + op.num_fields;
    const Field* field = std::find_if(op.fields, end, [&](const Field& one) { return name == one.name; });
    if (name == "parts") {
      parts = nb::cast<uint32_t>(value);
    } else if (field == end) {
      throw nb::type_error((std::string(op.name) + "() has no field " + name).c_str());
    } else {
      set(*field, value);
    }
  }
  plan.push(static_cast<int32_t>(index), params, parts);
}

}  // namespace

void bind_plan(nb::module_& m) {
  bind_values(m);
  nb::class_<ThreadPool>(m, "ThreadPool", "The engine's threads; see native/threads/pool.h.")
      .def(nb::init<int>(), "num_threads"_a)
      .def_prop_ro("num_threads", &ThreadPool::num_threads);
  nb::class_<Plan> plan(m, "Plan", "A list of ops with final addresses; see native/plan/plan.h.");
  plan.def(nb::init<std::shared_ptr<ThreadPool>, int64_t, int64_t>(), "pool"_a, "max_tokens"_a, "max_requests"_a);
  plan.def(
      "__init__",
      [](Plan* self, int num_threads, int64_t max_tokens, int64_t max_requests) {
        new (self) Plan(std::make_shared<ThreadPool>(num_threads), max_tokens, max_requests);
      },
      "num_threads"_a, "max_tokens"_a, "max_requests"_a);
  for (size_t i = 0; i < chosen_ops->ops.size(); ++i) {
    plan.def(chosen_ops->ops[i]->name,
             [i](Plan& self, const nb::args& values, const nb::kwargs& named) { push_op(self, i, values, named); });
  }
  plan.def(
      "run",
      [](Plan& self, uint32_t parts, int64_t num_requests, int64_t num_logit_rows, Address request_rows, Address starts,
         Address counts, Address logit_rows, Address tokens, int64_t tokens_stride, Address block_tables,
         int64_t table_stride, int64_t group_stride, Address nanoseconds) {
        const Step step = make_step(num_requests, num_logit_rows, request_rows, starts, counts, logit_rows, tokens,
                                    tokens_stride, block_tables, table_stride, group_stride);
        nb::gil_scoped_release release;
        self.run(step, parts, at<int64_t>(nanoseconds));
      },
      "parts"_a, "num_requests"_a, "num_logit_rows"_a, "request_rows"_a, "starts"_a, "counts"_a, "logit_rows"_a,
      "tokens"_a, "tokens_stride"_a, "block_tables"_a, "table_stride"_a, "group_stride"_a, "nanoseconds"_a = 0,
      "Compute one step: see `Step` in native/plan/types.h for the int32 arrays whose addresses these are.");
  plan.def_prop_ro("num_threads", &Plan::num_threads);
  plan.def(
      "set_tile_rows",
      [](Plan& self, int64_t num_rows) {
        if (num_rows > 0 && !has_tiles(*chosen_ops)) throw nb::value_error("this instruction set has no tiles");
        self.set_tile_rows(num_rows);
      },
      "num_rows"_a, "Use bf16 tiles in steps of at least so many rows; 0: in none. See native/plan/plan.h.");
  plan.def("fetch_experts", &Plan::fetch_experts,
           "Read the experts that tokens choose from a mapped file before products do. See native/plan/plan.h.");
  m.def("expert_bytes_wanted", &Fetcher::num_bytes_wanted, "Bytes of the experts that tokens of this process chose.");
  plan.def("set_ahead_bytes", &Plan::set_ahead_bytes, "num_bytes"_a,
           "Fetch at most so many bytes of keys and values in each thread before attention reads them.");
}

}  // namespace quire
