// A plan: a model's forward as a list of ops with final addresses, run by all threads in one call.
//
// Ops are added once, at load. `run` takes one step's batch of any mix of prompts and decodes: every op reads the
// number of rows from it. Nothing is allocated while a plan runs.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "isa/table.h"
#include "threads/fetcher.h"
#include "threads/pool.h"

namespace quire {

constexpr uint32_t kTokenParts = 1 | 16;
extern const OpTable* chosen_ops;  // isa/choose.cpp: the instruction set in use

class Plan {
 public:
  // The pool may run other things between steps.
  Plan(std::shared_ptr<ThreadPool> pool, int64_t max_tokens, int64_t max_requests);

  // `op`: its place in OpTable::ops; `params` are of its size. It runs when run()'s parts have one of `mask`'s bits;
  // kTokenParts are for ops of the step's tokens, others for ops of rows of logits.
  void push(int32_t op, const void* params, uint32_t mask);

  // Computes one step. The derived arrays of `step` are filled in here. `nanoseconds`: null, or where to leave the time
  // of each op that ran, in the order in which they were added.
  void run(Step step, uint32_t parts, int64_t* nanoseconds);

  // Steps with at least this number of rows (the head: rows of logits) give products bf16 rows where the plan says q8:
  // those of gemm_amx.h. 0: no step does. Only for instruction sets that have tiles.
  void set_tile_rows(int64_t num_rows) { tile_rows_ = num_rows; }

  // Bytes of keys and values that each thread may fetch for the next attention, instead of a share of the last cache.
  void set_ahead_bytes(int64_t num_bytes) { ahead_bytes_ = num_bytes; }

  // Experts lie in a file that is larger than memory: those that tokens choose are fetched before products read them.
  void fetch_experts() { fetcher_ = std::make_unique<Fetcher>(); }

  int num_threads() const { return pool_->num_threads(); }

 private:
  struct Entry {
    int32_t op;
    uint32_t mask;
    alignas(16) std::byte params[kMaxParams];
    alignas(16) std::byte tile_params[kMaxParams];  // the same with bf16 in place of q8 rows
  };

  void derive();
  void run_thread(int thread, Barrier& barrier);

  const int64_t max_tokens_, max_requests_;
  const std::shared_ptr<ThreadPool> pool_;
  std::vector<Entry> entries_;
  std::vector<int32_t> derived_;
  std::unique_ptr<std::byte[]> scratch_memory_;
  std::byte* scratch_;
  int64_t ahead_bytes_;
  int64_t tile_rows_ = 0;
  std::unique_ptr<Fetcher> fetcher_;
  Step step_{};
  uint32_t parts_ = 0;
  int64_t* nanoseconds_ = nullptr;
};

}  // namespace quire
