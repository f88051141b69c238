// Python's view of plans: addresses and numbers in, one call per step. The caller keeps the memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ops/kv_cache.h"
#include "plan/plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Address = uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

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
      .value("q8", WeightFormat::q8);
  nb::enum_<KvFormat>(m, "KvFormat")
      .value("f32", KvFormat::f32)
      .value("f16", KvFormat::f16)
      .value("bf16", KvFormat::bf16)
      .value("i8", KvFormat::i8);
  nb::enum_<Activation>(m, "Activation")
      .value("none", Activation::none)
      .value("relu", Activation::relu)
      .value("gelu", Activation::gelu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("silu", Activation::silu);
  nb::class_<Rows>(m, "Rows").def(
      "__init__",
      [](Rows* self, Address address, int64_t stride_bytes, RowType type) {
        new (self) Rows{at<std::byte>(address), stride_bytes, type};
      },
      "address"_a, "stride_bytes"_a, "type"_a);
  nb::class_<Weight>(m, "Weight")
      .def(
          "__init__",
          [](Weight* self, Address address, int64_t num_outputs, int64_t num_inputs, WeightFormat format) {
            new (self) Weight{at<std::byte>(address), num_outputs, num_inputs, format};
          },
          "address"_a, "num_outputs"_a, "num_inputs"_a, "format"_a);
  nb::class_<KvLayer>(m, "KvLayer")
      .def(
          "__init__",
          [](KvLayer* self, Address base, int64_t block_stride_bytes, int32_t block_size, int32_t num_kv_heads,
             int32_t head_size, KvFormat format, int32_t group) {
            if (block_size <= 0 || block_size % 16 != 0) throw nb::value_error("a block size is a multiple of 16");
            if (head_size <= 0 || head_size % 2 != 0 || head_size > kMaxHeadSize) {
              throw nb::value_error("a head size is even and at most 512");
            }
            new (self)
                KvLayer{at<std::byte>(base), block_stride_bytes, block_size, num_kv_heads, head_size, format, group};
          },
          "base"_a, "block_stride_bytes"_a, "block_size"_a, "num_kv_heads"_a, "head_size"_a, "format"_a, "group"_a);
  nb::class_<KvAhead>(m, "KvAhead")
      .def(
          "__init__",
          [](KvAhead* self, const KvLayer& kv, int64_t window, double begin, double end) {
            if (!(0 <= begin && begin <= end && end <= 1))
              throw nb::value_error("begin and end of a part are ascending and from 0 to 1");
            new (self) KvAhead{kv, window, begin, end};
          },
          "kv"_a, "window"_a, "begin"_a, "end"_a);
  m.def("tile_bytes", &tile_bytes, "format"_a, "num_inputs"_a, "Bytes of a packed tile of 16 outputs.");
  m.def("kv_layer_bytes", &kv_layer_bytes, "format"_a, "block_size"_a, "num_kv_heads"_a, "head_size"_a,
        "Bytes of one block of one layer of the KV pool.");
  m.def("wanted_rows", &wanted_rows, "format"_a, "The type of rows that a product with such a weight reads.");
}

void bind_ops(nb::class_<Plan>& plan) {
  plan.def(
      "embed",
      [](Plan& self, const Weight& table, const Rows& out, int64_t offset, bool of_positions, bool add,
         uint32_t parts) { self.push(EmbedOp{table, out, offset, of_positions, add}, parts); },
      "table"_a, "out"_a, "offset"_a = 0, "of_positions"_a = false, "add"_a = false, "parts"_a = 1);
  plan.def(
      "rotary",
      [](Plan& self, Address frequencies, Address cos, Address sin, int64_t half, uint32_t parts) {
        self.push(RotaryOp{at<float>(frequencies), at<float>(cos), at<float>(sin), half}, parts);
      },
      "frequencies"_a, "cos"_a, "sin"_a, "half"_a, "parts"_a = 1);
  plan.def(
      "norm",
      [](Plan& self, const Rows& in, const Rows& out, Address weight, Address bias, int64_t width, float epsilon,
         bool subtract_mean, uint32_t parts) {
        self.push(NormOp{in, out, at<float>(weight), at<float>(bias), width, epsilon, subtract_mean}, parts);
      },
      "in_"_a, "out"_a, "weight"_a, "bias"_a, "width"_a, "epsilon"_a, "subtract_mean"_a = false, "parts"_a = 1);
  plan.def(
      "gemm",
      [](Plan& self, const Weight& weight, Address bias, const Rows& x, const Rows& out, Activation activation,
         bool gated, bool add, bool of_logit_rows, const KvAhead* ahead, uint32_t parts) {
        self.push(GemmOp{weight, at<float>(bias), x, out, activation, gated, add, of_logit_rows,
                         ahead == nullptr ? KvAhead{} : *ahead},
                  parts);
      },
      "weight"_a, "bias"_a, "x"_a, "out"_a, "activation"_a = Activation::none, "gated"_a = false, "add"_a = false,
      "of_logit_rows"_a = false, "ahead"_a.none() = nb::none(), "parts"_a = 1);
  plan.def(
      "write_kv",
      [](Plan& self, Address q, Address k, Address v, int64_t stride, int32_t num_heads, Address q_norm, Address k_norm,
         float epsilon, Address cos, Address sin, const KvLayer& kv, uint32_t parts) {
        self.push(WriteKvOp{at<float>(q), at<float>(k), at<float>(v), stride, num_heads, at<float>(q_norm),
                            at<float>(k_norm), epsilon, at<float>(cos), at<float>(sin), kv},
                  parts);
      },
      "q"_a, "k"_a, "v"_a, "stride"_a, "num_heads"_a, "q_norm"_a, "k_norm"_a, "epsilon"_a, "cos"_a, "sin"_a, "kv"_a,
      "parts"_a = 1);
  plan.def(
      "attend",
      [](Plan& self, Address q, int64_t stride, const Rows& out, int32_t num_heads, int64_t window, float scale,
         const KvLayer& kv,
         uint32_t parts) { self.push(AttendOp{at<float>(q), stride, out, num_heads, window, scale, kv}, parts); },
      "q"_a, "stride"_a, "out"_a, "num_heads"_a, "window"_a, "scale"_a, "kv"_a, "parts"_a = 1);
  plan.def(
      "activate",
      [](Plan& self, const Rows& in, const Rows& out, int64_t width, Activation activation, bool gated,
         bool of_logit_rows, bool from_logit_rows, uint32_t parts) {
        self.push(ActivateOp{in, out, width, activation, gated, of_logit_rows, from_logit_rows}, parts);
      },
      "in_"_a, "out"_a, "width"_a, "activation"_a = Activation::none, "gated"_a = false, "of_logit_rows"_a = false,
      "from_logit_rows"_a = false, "parts"_a = 1);
  plan.def(
      "add",
      [](Plan& self, const Rows& a, const Rows& b, const Rows& out, int64_t width, uint32_t parts) {
        self.push(AddOp{a, b, out, width}, parts);
      },
      "a"_a, "b"_a, "out"_a, "width"_a, "parts"_a = 1);
  plan.def(
      "head",
      [](Plan& self, const Weight& weight, Address bias, const Rows& x, Address best_values, Address best_ids,
         int64_t max_rows, uint32_t parts) {
        self.push(HeadOp{weight, at<float>(bias), x, at<float>(best_values), at<int32_t>(best_ids), max_rows}, parts);
      },
      "weight"_a, "bias"_a, "x"_a, "best_values"_a, "best_ids"_a, "max_rows"_a, "parts"_a = 1);
  plan.def(
      "argmax",
      [](Plan& self, Address best_values, Address best_ids, int64_t max_rows, Address token_ids, uint32_t parts) {
        self.push(ArgmaxOp{at<float>(best_values), at<int32_t>(best_ids), max_rows, at<int32_t>(token_ids)}, parts);
      },
      "best_values"_a, "best_ids"_a, "max_rows"_a, "token_ids"_a, "parts"_a = 1);
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
  bind_ops(plan);
  plan.def(
      "run",
      [](Plan& self, uint32_t parts, int64_t num_requests, int64_t num_logit_rows, Address request_rows, Address starts,
         Address counts, Address logit_rows, Address tokens, int64_t tokens_stride, Address block_tables,
         int64_t table_stride, int64_t group_stride) {
        const Step step = make_step(num_requests, num_logit_rows, request_rows, starts, counts, logit_rows, tokens,
                                    tokens_stride, block_tables, table_stride, group_stride);
        nb::gil_scoped_release release;
        self.run(step, parts);
      },
      "parts"_a, "num_requests"_a, "num_logit_rows"_a, "request_rows"_a, "starts"_a, "counts"_a, "logit_rows"_a,
      "tokens"_a, "tokens_stride"_a, "block_tables"_a, "table_stride"_a, "group_stride"_a,
      "Compute one step: see `Step` in native/plan/types.h for the int32 arrays whose addresses these are.");
  plan.def_prop_ro("num_threads", &Plan::num_threads);
  plan.def("set_profiling", &Plan::set_profiling, "on"_a, "Time every op from now on, or stop.");
  plan.def("nanoseconds", &Plan::nanoseconds, "Per op since profiling was switched on.");
  plan.def("op_names", &Plan::op_names, "Per op its name.");
}

}  // namespace quire
