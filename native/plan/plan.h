// A plan: a model's forward as a list of ops with final addresses, run by all threads in one call.
//
// Ops are added once, at load. `run` takes one step's batch of any mix of prompts and decodes: every op reads the
// number of rows from it. Nothing is allocated while a plan runs.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "isa/table.h"
#include "plan/ops.h"
#include "threads/pool.h"

namespace quire {

extern const OpTable* chosen_ops;  // isa/choose.cpp: the instruction set in use

class Plan {
 public:
  // The pool may run other things between steps.
  Plan(std::shared_ptr<ThreadPool> pool, int64_t max_tokens, int64_t max_requests);

  // `mask`: the op runs when run()'s parts have one of its bits.
#define QUIRE_PUSH(name, Params)                                          \
  void push(const Params& params, uint32_t mask) {                        \
    push_raw(                                                             \
        #name,                                                            \
        [](const OpTable& table, const void* p, const Context& context) { \
          table.name(*static_cast<const Params*>(p), context);            \
        },                                                                \
        &params, sizeof params, mask);                                    \
  }
  QUIRE_OPS(QUIRE_PUSH)
#undef QUIRE_PUSH

  // Computes one step. The derived arrays of `step` are filled in here.
  void run(Step step, uint32_t parts);

  int num_threads() const { return pool_->num_threads(); }

  // Nanoseconds per op since profiling was switched on, in the order of the ops; empty when off.
  void set_profiling(bool on);
  const std::vector<int64_t>& nanoseconds() const { return nanoseconds_; }
  std::vector<std::string> op_names() const;

 private:
  using Call = void (*)(const OpTable&, const void*, const Context&);
  static constexpr size_t kMaxParams = 256;
  struct Entry {
    const char* name;
    Call call;
    uint32_t mask;
    alignas(16) unsigned char params[kMaxParams];
  };

  void push_raw(const char* name, Call call, const void* params, size_t size, uint32_t mask);
  void derive();
  void run_thread(int thread, Barrier& barrier);

  const int64_t max_tokens_, max_requests_;
  const std::shared_ptr<ThreadPool> pool_;
  std::vector<Entry> entries_;
  std::vector<int32_t> derived_;
  std::unique_ptr<std::byte[]> scratch_memory_;
  std::byte* scratch_;
  const int64_t ahead_bytes_;
  std::vector<int64_t> nanoseconds_;
  Step step_{};
  uint32_t parts_ = 0;
};

}  // namespace quire
