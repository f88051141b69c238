// A causal convolution of each channel over time, whose last inputs are a part of the request's recurrent state.
#pragma once
#include "ops/functions.h"
#include "plan/op.h"

namespace quire {

// out[t, c] = activation(bias[c] + sum over j < taps of weight[j, c] * x[t - taps + 1 + j, c]). Inputs before the
// step's first token come from the state, which is [taps - 1, channels] of f32, the oldest first; before the request's
// first token they are zero, and the state is not read.
struct CausalConvOp {
  Rows x;               // f32 [T, channels]
  Rows out;             // f32 [T, channels]
  const float* weight;  // [taps, channels]
  const float* bias;    // [channels]; null: zero
  KvLayer kv;  // of which only the pages, block_stride_bytes apart, and the block tables matter: entry 0 is the page
  int64_t channels;
  int64_t taps;
  Activation activation;
};

namespace {

constexpr int64_t kConvChannels = 1024;  // of one work item at most: rows are far apart, and short pieces of them slow
constexpr int64_t kMostTaps = 16;

// Channels first … first + count - 1 of request r. `history` has room for taps - 1 rows of kConvChannels.
inline void convolve(const CausalConvOp& op, const Step& step, int64_t r, int64_t first, int64_t count,
                     float* history) {
  const int64_t past = op.taps - 1, begin = step.first_tokens[r], num_tokens = step.counts[r];
  std::byte* page = op.kv.base + step.block_table(op.kv.group, r)[0] * op.kv.block_stride_bytes;
  float* state = reinterpret_cast<float*>(page) + first;
  const size_t bytes = static_cast<size_t>(count) * sizeof(float);
  for (int64_t j = 0; j < past; ++j) {
    if (step.starts[r] == 0) {
      memset(history + j * kConvChannels, 0, bytes);
    } else {
      memcpy(history + j * kConvChannels, state + j * op.channels, bytes);
    }
  }
  const auto input = [&](int64_t t) -> const float* {
    return t < 0 ? history + (past + t) * kConvChannels : row<float>(op.x, begin + t) + first;
  };
  for (int64_t t = 0; t < num_tokens; ++t) {
    const float* inputs[kMostTaps];
    for (int64_t j = 0; j < op.taps; ++j) inputs[j] = input(t - past + j);
    // Rows are pages apart, which no prefetcher of the processor follows.
    for (int64_t i = 0; i < count && t + 1 < num_tokens; i += kLanes) {
      prefetch_l1(input(t + 1) + i);
      prefetch_to_write(row<float>(op.out, begin + t + 1) + first + i);
    }
    float* out = row<float>(op.out, begin + t) + first;
    constexpr int64_t kWidth = kSideBySide * kLanes;
    int64_t whole = 0;
    for (; whole + kWidth <= count; whole += kWidth) {
      F32x16 totals[kSideBySide];
      QUIRE_UNROLL for (int k = 0; k < kSideBySide; ++k) {
        totals[k] = op.bias != nullptr ? load(op.bias + first + whole + k * kLanes) : zero();
      }
      for (int64_t j = 0; j < op.taps; ++j) {
        const float *weights = op.weight + j * op.channels + first + whole, *x = inputs[j] + whole;
        QUIRE_UNROLL for (int k = 0; k < kSideBySide; ++k) {
          totals[k] = fma(load(weights + k * kLanes), load(x + k * kLanes), totals[k]);
        }
      }
      activate(op.activation, totals);
      QUIRE_UNROLL for (int k = 0; k < kSideBySide; ++k) store(out + whole + k * kLanes, totals[k]);
    }
    float values[kConvChannels];
    int64_t i = whole;
    for (; i + kLanes <= count; i += kLanes) {
      F32x16 total = op.bias != nullptr ? load(op.bias + first + i) : zero();
      for (int64_t j = 0; j < op.taps; ++j) {
        total = fma(load(op.weight + j * op.channels + first + i), load(inputs[j] + i), total);
      }
      store(values + i, total);
    }
    for (; i < count; ++i) {
      float total = op.bias != nullptr ? op.bias[first + i] : 0.0f;
      for (int64_t j = 0; j < op.taps; ++j) {
        total = __builtin_fmaf(op.weight[j * op.channels + first + i], inputs[j][i], total);
      }
      values[i] = total;
    }
    apply(op.activation, values + whole, nullptr, out + whole, count - whole);
  }
  for (int64_t j = 0; j < past; ++j) memcpy(state + j * op.channels, input(num_tokens - past + j), bytes);
}

// Work items are ordered by channels, so that each thread has a part of every request, long or short.
inline void causal_conv(const CausalConvOp& op, const Context& context) {
  const Step& step = *context.step;
  const int64_t even = (op.channels / context.num_threads / kLanes + 1) * kLanes;
  const int64_t width = even < kConvChannels ? even : kConvChannels, chunks = (op.channels + width - 1) / width;
  const Range mine = share(chunks * step.num_requests, context);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t first = item / step.num_requests * width, left = op.channels - first;
    convolve(op, step, item % step.num_requests, first, left < width ? left : width,
             reinterpret_cast<float*>(context.scratch));
  }
}

QUIRE_OP(causal_conv, CausalConvOp, x, out, weight, bias, kv, channels, taps, activation)

}  // namespace
}  // namespace quire
