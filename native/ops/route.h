// Mixture of experts: the experts of each token, and the tokens of each expert.
#pragma once
#include "ops/functions.h"
#include "plan/op.h"

namespace quire {

// A token of the step, and the weight of one of its experts.
struct RoutedRow {
  int32_t token;
  float weight;
};

// Per token the top_k largest of its X logits, the lower index first among equal ones. An expert's weight is `factor`
// times exp(l - max) over the sum of all X, or over the sum of the chosen ones if `renormalise`.
// is_sigmoid: the choice is by s + bias, s = 1 / (1 + exp(-l)), and a weight is s, or that over the sum of the chosen
// ones. Only experts of the top_groups groups are chosen whose group_best largest values have the largest sums.
struct RouteOp {
  Rows logits;        // f32 [T, X]
  Rows choices;       // [T, 2 * top_k]: int32 indices of experts, then f32 weights
  RoutedRow* routed;  // [T * top_k], by expert, and by token within an expert
  int32_t* counts;    // [X]: tokens of each expert
  int64_t num_experts;
  int64_t top_k;
  bool renormalise;
  const float* bias;  // [X] or null
  bool is_sigmoid;
  int64_t num_groups;
  int64_t top_groups;
  int64_t group_best;  // at most kMostGroupBest
  float factor;
  const float* scales;  // [X], of each expert's weights, or null
};

namespace {

constexpr int64_t kMostGroupBest = 4;
constexpr int64_t kTokensAlone = 8;  // a barrier costs as much as routing some tokens

// Indices and logits of the largest logits, in descending order. NaN is below all, but not skipped among the first.
inline void choose_largest(const float* logits, int64_t num_experts, int64_t top_k, int32_t* experts, float* largest) {
  int64_t count = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    if (count == top_k && !(logits[e] > largest[top_k - 1])) continue;
    int64_t at = count < top_k ? count++ : top_k - 1;
    for (; at > 0 && logits[e] > largest[at - 1]; --at) {
      largest[at] = largest[at - 1];
      experts[at] = experts[at - 1];
    }
    largest[at] = logits[e];
    experts[at] = static_cast<int32_t>(e);
  }
}

// values[i] = exp(values[i] - max); returns their sum over 16 lanes, then a fixed tree.
inline float exponentials(const float* values, int64_t count, float max, float* out) {
  F32x16 total = zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = count - i < kLanes ? count - i : kLanes;
    alignas(64) float lanes[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = lane < left ? values[i + lane] : -__builtin_inff();
    const F32x16 weights = exp(load(lanes) - broadcast(max));
    total = total + weights;
    if (out == nullptr) continue;
    store(lanes, weights);
    for (int64_t lane = 0; lane < left; ++lane) out[i + lane] = lanes[lane];
  }
  return sum(total);
}

inline float sigmoid(float x) {
  float lanes[kLanes];
  store(lanes, broadcast(1.0f) / (broadcast(1.0f) + exp(broadcast(-x))));
  return lanes[0];
}

// values[e] = -inf for all experts of the groups that are not chosen. `memory`: room for 3 floats per group.
inline void limit_groups(const RouteOp& op, float* values, float* memory) {
  const int64_t size = op.num_experts / op.num_groups;
  float *sums = memory, *largest = memory + op.num_groups;
  auto* chosen = reinterpret_cast<int32_t*>(largest + op.num_groups);
  for (int64_t g = 0; g < op.num_groups; ++g) {
    float best[kMostGroupBest];
    int32_t unused[kMostGroupBest];
    choose_largest(values + g * size, size, op.group_best, unused, best);
    sums[g] = 0.0f;
    for (int64_t i = 0; i < op.group_best; ++i) sums[g] += best[i];
  }
  choose_largest(sums, op.num_groups, op.top_groups, chosen, largest);
  for (int64_t g = 0; g < op.num_groups; ++g) {
    bool is_chosen = false;
    for (int64_t i = 0; i < op.top_groups; ++i) is_chosen = is_chosen || chosen[i] == g;
    for (int64_t e = 0; e < size && !is_chosen; ++e) values[g * size + e] = -__builtin_inff();
  }
}

// `memory`: room for X + 3 floats per group.
inline void route_token(const RouteOp& op, int64_t token, float* memory) {
  const float* logits = row<float>(op.logits, token);
  int32_t* experts = row<int32_t>(op.choices, token);
  float* weights = row<float>(op.choices, token) + op.top_k;
  const float* values = logits;
  if (op.is_sigmoid || op.top_groups < op.num_groups) {
    for (int64_t e = 0; e < op.num_experts; ++e) {
      memory[e] = op.is_sigmoid ? sigmoid(logits[e]) + (op.bias == nullptr ? 0.0f : op.bias[e]) : logits[e];
    }
    if (op.top_groups < op.num_groups) limit_groups(op, memory, memory + op.num_experts);
    values = memory;
  }
  choose_largest(values, op.num_experts, op.top_k, experts, weights);
  float total = 0.0f;
  if (op.is_sigmoid) {
    for (int64_t i = 0; i < op.top_k; ++i) total += weights[i] = sigmoid(logits[experts[i]]);
    total = op.renormalise ? total + 1e-20f : 1.0f;
  } else {
    const float max = weights[0], chosen = exponentials(weights, op.top_k, max, weights);
    total = op.renormalise ? chosen : exponentials(logits, op.num_experts, max, nullptr);
  }
  for (int64_t i = 0; i < op.top_k; ++i) {
    weights[i] = op.factor * (weights[i] / total) * (op.scales == nullptr ? 1.0f : op.scales[experts[i]]);
  }
}

// Sorts all choices by expert. `next`: room for X integers.
inline void group_by_expert(const RouteOp& op, int64_t num_tokens, int32_t* next) {
  for (int64_t e = 0; e < op.num_experts; ++e) op.counts[e] = 0;
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t i = 0; i < op.top_k; ++i) ++op.counts[row<int32_t>(op.choices, t)[i]];
  }
  int32_t first = 0;
  for (int64_t e = 0; e < op.num_experts; ++e) {
    next[e] = first;
    first += op.counts[e];
  }
  for (int64_t t = 0; t < num_tokens; ++t) {
    const int32_t* experts = row<int32_t>(op.choices, t);
    const float* weights = row<float>(op.choices, t) + op.top_k;
    for (int64_t i = 0; i < op.top_k; ++i) op.routed[next[experts[i]]++] = {static_cast<int32_t>(t), weights[i]};
  }
}

inline void route(const RouteOp& op, const Context& context) {
  const int64_t num_tokens = context.step->num_tokens;
  const bool alone = num_tokens <= kTokensAlone;
  const Range mine = alone ? Range{0, context.thread == 0 ? num_tokens : 0} : share(num_tokens, context);
  for (int64_t t = mine.begin; t < mine.end; ++t) route_token(op, t, reinterpret_cast<float*>(context.scratch));
  if (!alone) wait_for_all(*context.barrier);
  if (context.thread == 0) group_by_expert(op, num_tokens, reinterpret_cast<int32_t*>(context.scratch));
}

QUIRE_OP(route, RouteOp, logits, choices, routed, counts, num_experts, top_k, renormalise, bias, is_sigmoid, num_groups,
         top_groups, group_best, factor, scales)

}  // namespace
}  // namespace quire
