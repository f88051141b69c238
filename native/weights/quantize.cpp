#include "weights/quantize.h"

#include <cmath>
#include <stdexcept>
#include <thread>
#include <vector>

#include "isa/choose.h"

namespace quire {
namespace {

constexpr int kLongestBlock = 256;

const BlockQuantizer& quantizer_of(const std::string& name) {
  for (int i = 0; i < kNumQuantizers; ++i) {
    if (name == chosen_ops->quantizers[i].format) return chosen_ops->quantizers[i];
  }
  throw std::invalid_argument("weights are not quantised to " + name);
}

void encode_row(const QuantizedRows& job, const BlockQuantizer& format, int64_t row) {
  const float* x = job.rows + row * job.num_inputs;
  double squares = 0.0;
  for (int64_t i = 0; i < job.num_inputs; ++i) squares += static_cast<double>(x[i]) * x[i];
  const float mean = static_cast<float>(squares / static_cast<double>(job.num_inputs));
  const int64_t num_blocks = job.num_inputs / format.len;
  for (int64_t block = 0; block < num_blocks; ++block) {
    float w[kLongestBlock];
    const float* values = x + block * format.len;
    for (int i = 0; i < format.len; ++i) {
      const float importance = job.importance == nullptr ? 1.0f : job.importance[block * format.len + i];
      w[i] = importance * std::sqrt(mean + values[i] * values[i]);
    }
    format.encode(values, w, job.out + (row * num_blocks + block) * format.bytes);
  }
}

}  // namespace

void quantize_rows(const QuantizedRows& job, int num_threads) {
  const BlockQuantizer& format = quantizer_of(job.format);
  if (job.num_inputs % format.len != 0) {
    throw std::invalid_argument("rows of " + std::to_string(job.num_inputs) + " weights are no whole blocks of " +
                                std::to_string(format.len));
  }
  std::vector<std::thread> threads;
  const auto share = [&](int64_t index) {
    for (int64_t row = job.num_rows * index / num_threads; row < job.num_rows * (index + 1) / num_threads; ++row) {
      encode_row(job, format, row);
    }
  };
  for (int64_t index = 1; index < num_threads; ++index) threads.emplace_back(share, index);
  share(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace quire
