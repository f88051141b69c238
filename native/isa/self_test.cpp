// Each op of an instruction set on a small fixed input, beside the scalar one: all must give the same bits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>

#include "isa/choose.h"
#include "op_headers.h"
#include "threads/pool.h"
#include "weights/half.h"

namespace quire {
namespace {

constexpr int64_t kTokens = 9, kWidth = 256, kVocabulary = 40;
constexpr int32_t kStart = 12;  // the tokens lie in two blocks
constexpr int64_t kHeads = 2, kKvHeads = 1, kHeadSize = 64, kBlockSize = 16, kNumBlocks = 2;
constexpr int64_t kQkv = (kHeads + 2 * kKvHeads) * kHeadSize;

class Random {
 public:
  uint32_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 17;
    state_ ^= state_ << 5;
    return state_;
  }
  // -1 … 1, and nothing so small that a product of two is denormal.
  float value() { return (static_cast<float>(bits() >> 8) - 8388607.5f) / 8388608.0f; }

 private:
  uint32_t state_ = 2463534242u;
};

// Zeroed memory at a multiple of 64.
class Memory {
 public:
  explicit Memory(int64_t size) : size_(size), memory_(new std::byte[static_cast<size_t>(size) + 64]()) {}
  std::byte* data() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    return memory_.get() + (64 - address % 64) % 64;
  }
  float* floats() { return reinterpret_cast<float*>(data()); }
  void fill(Random& random) {
    for (int64_t i = 0; i < size_ / 4; ++i) floats()[i] = random.value();
  }
  std::string bytes() { return {reinterpret_cast<const char*>(data()), static_cast<size_t>(size_)}; }

 private:
  int64_t size_;
  std::unique_ptr<std::byte[]> memory_;
};

template <typename Params>
void run_op(const OpTable& table, const char* name, const Params& params, const Context& context) {
  const auto named = [&](const Op* op) { return strcmp(op->name, name) == 0; };
  (*std::find_if(table.ops.begin(), table.ops.end(), named))->run(&params, context);
}

Rows rows_of(Memory& memory, RowType type, int64_t width) {
  const int64_t item = type == RowType::bf16 ? 2 : 4;
  return {memory.data(), type == RowType::q8 ? width / kBlock * int64_t{sizeof(ActBlock)} : width * item, type};
}

// One step of one request, whose earlier positions have keys and values of zero.
class SmallStep {
 public:
  explicit SmallStep(int64_t num_tokens) : scratch_(new std::byte[kScratchBytes + 64]) {
    for (int32_t i = 0; i < kTokens; ++i) {
      numbers_[i] = i;
      positions_[i] = kStart + i;
      ids_[i] = i * 7 % kVocabulary;
    }
    counts_[1] = static_cast<int32_t>(num_tokens);
    step_.num_requests = 1;
    step_.allows_tiles = true;
    step_.num_tokens = step_.num_logit_rows = num_tokens;
    step_.request_rows = step_.token_requests = zeros_;
    step_.starts = positions_;
    step_.counts = counts_ + 1;
    step_.first_tokens = counts_;
    step_.tokens = step_.token_ids = ids_;
    step_.tokens_stride = kTokens;
    step_.positions = positions_;
    step_.logit_rows = step_.block_tables = numbers_;
  }
  Context context() {
    const auto address = reinterpret_cast<uintptr_t>(scratch_.get());
    return {&step_, 0, 1, scratch_.get() + (64 - address % 64) % 64, &barrier_, kScratchBytes};
  }

 private:
  int32_t zeros_[kTokens] = {}, numbers_[kTokens], positions_[kTokens], ids_[kTokens], counts_[2] = {};
  std::unique_ptr<std::byte[]> scratch_;  // not zeroed: few of its pages are touched
  Step step_{};
  Barrier barrier_{1};
};

// Any bits are a 4- or 8-bit weight; floats and scales must be finite and not tiny.
Weight random_weight(Memory& memory, WeightFormat format, int64_t num_outputs, int64_t num_inputs, Random& random) {
  const int64_t size = tile_bytes(format, num_inputs), num_tiles = num_outputs / kTile;
  if (format == WeightFormat::f32) {
    memory.fill(random);
  } else {
    auto* halves = reinterpret_cast<uint16_t*>(memory.data());
    const bool bf16 = format == WeightFormat::bf16;
    for (int64_t i = 0; i < num_tiles * size / 2; ++i) {
      halves[i] = bf16 ? round_to_bf16(random.value()) : round_to_f16(random.value());
    }
  }
  // Any byte may be a scale of mxfp4 or nvfp4, but those are finite and not tiny.
  const int64_t codes = num_inputs / kBlock * 256;
  const int64_t inputs = format == WeightFormat::mxfp4 ? 32 : format == WeightFormat::nvfp4 ? 16 : 0;
  for (int64_t tile = 0; inputs != 0 && tile < num_tiles; ++tile) {
    std::byte* scales = memory.data() + tile * size + codes;
    for (int64_t i = 0; i < num_inputs / inputs * kTile; ++i) {
      scales[i] = (scales[i] & std::byte{7}) | std::byte{0x70};
    }
  }
  return {memory.data(), num_outputs, num_inputs, format};
}

std::string gemm_results(const OpTable& ops, WeightFormat format, int64_t num_outputs) {
  Random random;
  Memory values(kTokens * kWidth * 4), x(kTokens * kWidth * 4), packed(num_outputs * kWidth * 4 + 4096);
  values.fill(random);
  const Weight weight = random_weight(packed, format, num_outputs, kWidth, random);
  const Rows in = rows_of(x, wanted_rows(format), kWidth);
  std::string results;
  for (int64_t num_tokens : {kTokens, int64_t{1}}) {
    SmallStep step(num_tokens);
    Memory out(kTokens * num_outputs * 4), best(kTokens * 8);
    auto* ids = reinterpret_cast<int32_t*>(best.floats() + kTokens);
    const Rows wide = rows_of(values, RowType::f32, kWidth), to = rows_of(out, RowType::f32, num_outputs);
    run_op(scalar_ops(), "activate", ActivateOp{wide, in, kWidth, Activation::none, false, false, false},
           step.context());
    run_op(ops, "gemm", GemmOp{weight, nullptr, in, to, Activation::silu, false, false, false, {}, nullptr},
           step.context());
    if (num_tokens == 1) {
      run_op(ops, "head", HeadOp{weight, nullptr, in, best.floats(), ids, kTokens, 0, 0}, step.context());
    }
    run_op(ops, "embed", EmbedOp{weight, wide, 0, false, false}, step.context());
    results += out.bytes() + best.bytes() + values.bytes();
  }
  return results;
}

// A product with two adapters: one of seven rows, which differ in how many are computed at once, and one of a single
// row.
std::string lora_results(const OpTable& ops, bool is_bf16) {
  Random random;
  constexpr int64_t kOutputs = 3 * kTile, kFirstRank = 5, kSecondRank = 3, kProducts = kFirstRank + kSecondRank;
  constexpr int64_t kValues = kProducts * kWidth + (kFirstRank + 2 * kSecondRank) * kTile;
  Memory values(kTokens * kWidth * 4), x(kTokens * kWidth * 4), packed(kOutputs * kWidth * 4 + 4096);
  Memory matrices(kValues * 4), products(kTokens * kProducts * 4), out(kTokens * kOutputs * 4);
  values.fill(random);
  matrices.fill(random);
  if (is_bf16) {
    auto* halves = reinterpret_cast<uint16_t*>(matrices.data());
    for (int64_t i = 0; i < kValues; ++i) halves[i] = round_to_bf16(random.value());
  }
  const int64_t item = is_bf16 ? 2 : 4;
  const std::byte* b = matrices.data() + kProducts * kWidth * item;
  const LoraPart first{0, 1, b, 0, kFirstRank}, second{1, 3, b + kFirstRank * kTile * item, kFirstRank, kSecondRank};
  const LoraEntry entries[] = {{matrices.data(), kProducts, 2, is_bf16, {first, second}},
                               {matrices.data(), kFirstRank, 1, is_bf16, {first}}};
  const int32_t starts[] = {0, 7, 8}, slots[] = {0, 1}, rows[] = {0, 2, 3, 4, 6, 7, 8, 5};
  const LoraStep adapters{2, starts, slots, rows, products.floats(), kProducts};
  const LoraSite site{&adapters, entries};
  const Weight weight = random_weight(packed, WeightFormat::q8, kOutputs, kWidth, random);
  const Rows in = rows_of(x, RowType::q8, kWidth), wide = rows_of(values, RowType::f32, kWidth);
  SmallStep step(kTokens);
  run_op(scalar_ops(), "activate", ActivateOp{wide, in, kWidth, Activation::none, false, false, false}, step.context());
  run_op(ops, "lora", LoraOp{in, kWidth, &site}, step.context());
  const Rows to = rows_of(out, RowType::f32, kOutputs);
  run_op(ops, "gemm", GemmOp{weight, nullptr, in, to, Activation::none, false, false, false, {}, &site},
         step.context());
  return products.bytes() + out.bytes();
}

std::string row_results(const OpTable& ops) {
  Random random;
  Memory values(kTokens * kWidth * 4), weight(kWidth * 4);
  values.fill(random);
  weight.fill(random);
  const Rows in = rows_of(values, RowType::f32, kWidth);
  SmallStep step(kTokens);
  std::string results;
  for (RowType type : {RowType::f32, RowType::bf16, RowType::q8}) {
    Memory norm(kTokens * kWidth * 4), gated(kTokens * kWidth * 4);
    const NormOp op{
        in, rows_of(norm, type, kWidth), weight.floats(), nullptr, kWidth, 1e-5f, type == RowType::bf16, 0, false};
    run_op(ops, "norm", op, step.context());
    const Activation activation = type == RowType::f32 ? Activation::gelu : Activation::gelu_tanh;
    run_op(ops, "activate", ActivateOp{in, rows_of(gated, type, kBlock), kBlock, activation, true, false, false},
           step.context());
    results += norm.bytes() + gated.bytes();
  }
  return results;
}

std::string expert_results(const OpTable& ops, WeightFormat format) {
  Random random;
  constexpr int64_t kExperts = 4, kTopK = 2, kSize = 64, kOutputs = 48;
  Memory values(kTokens * kSize * 4), x(kTokens * kSize * 4), inner(kTokens * kTopK * kSize * 4);
  Memory up(kExperts * 2 * kSize * kSize * 4 + 4096), down(kExperts * kOutputs * kSize * 4 + 4096);
  Memory logits(kTokens * kExperts * 4), choices(kTokens * kTopK * 8), routed(kTokens * kTopK * 8),
      counts(kExperts * 4);
  Memory out(kTokens * kOutputs * 4);
  values.fill(random);
  logits.fill(random);
  const Weight ups = random_weight(up, format, kExperts * 2 * kSize, kSize, random);
  const Weight downs = random_weight(down, format, kExperts * kOutputs, kSize, random);
  const Rows wide = rows_of(values, RowType::f32, kSize), in = rows_of(x, wanted_rows(format), kSize);
  const Rows between = rows_of(inner, wanted_rows(format), kSize), to = rows_of(out, RowType::f32, kOutputs);
  const auto* rows = reinterpret_cast<RoutedRow*>(routed.data());
  auto* loads = reinterpret_cast<int32_t*>(counts.data());
  SmallStep step(kTokens);
  const RouteOp route{rows_of(logits, RowType::f32, kExperts),
                      rows_of(choices, RowType::f32, 2 * kTopK),
                      reinterpret_cast<RoutedRow*>(routed.data()),
                      loads,
                      kExperts,
                      kTopK,
                      true,
                      nullptr,
                      false,
                      1,
                      1,
                      1,
                      1.0f};
  run_op(scalar_ops(), "activate", ActivateOp{wide, in, kSize, Activation::none, false, false, false}, step.context());
  run_op(ops, "route", route, step.context());
  run_op(ops, "expert_up",
         ExpertUpOp{ups, nullptr, in, between, rows, loads, kExperts, Activation::silu, 1.702f,
                    format == WeightFormat::f32 ? 0.5f : 0.0f},
         step.context());
  run_op(ops, "expert_down", ExpertDownOp{downs, nullptr, between, to, rows, loads, kExperts, false}, step.context());
  return routed.bytes() + out.bytes();
}

std::string attention_results(const OpTable& ops, KvFormat format) {
  Random random;
  constexpr int64_t kBlockBytes = 2 * kBlockSize * kKvHeads * (kHeadSize * 4 + 4);
  Memory qkv(kTokens * kQkv * 4), pool(kNumBlocks * kBlockBytes), out(kTokens * kHeads * kHeadSize * 4);
  Memory frequencies(kHeadSize * 2), cos(kTokens * kHeadSize * 2), sin(kTokens * kHeadSize * 2);
  qkv.fill(random);
  frequencies.fill(random);
  SmallStep step(kTokens);
  float* q = qkv.floats();
  float* k = q + kHeads * kHeadSize;
  const KvLayer kv{pool.data(), kBlockBytes, kBlockSize, kKvHeads, kHeadSize, format, 0};
  constexpr int64_t kHalf = kHeadSize / 2;
  run_op(ops, "rotary", RotaryOp{frequencies.floats(), cos.floats(), sin.floats(), kHalf}, step.context());
  const WriteKvOp write{
      q,     k, k + kKvHeads * kHeadSize, kQkv, kQkv, kQkv, kHeads, nullptr, nullptr, 1e-5f, cos.floats(), sin.floats(),
      kHalf, kv};
  run_op(ops, "write_kv", write, step.context());
  const Rows to = rows_of(out, RowType::f32, kHeads * kHeadSize);
  run_op(ops, "attend", AttendOp{q, kQkv, to, kHeads, 0, 0.125f, kv, 0.0f, frequencies.floats()}, step.context());
  return out.bytes();
}

// A convolution of 100 channels, then a recurrence on its results with 2 heads, both from states that are not zero.
std::string state_results(const OpTable& ops, bool delta) {
  constexpr int64_t kKeySize = 24, kValueSize = 26, kStateHeads = 2,
                    kChannels = 2 * kKeySize + kStateHeads * kValueSize;
  Random random;
  Memory values(kTokens * kChannels * 4), mixed(kTokens * kChannels * 4), gates(kTokens * 2 * kStateHeads * 4);
  Memory weight(4 * kChannels * 4), vectors(3 * kStateHeads * 4), out(kTokens * kStateHeads * kValueSize * 4);
  constexpr int64_t kColumns = 2 * kLanes;  // of keys and of values, whole vectors
  Memory past(3 * kChannels * 4);
  Memory state((kStateHeads * ((kKeySize + 8) * kColumns + kLanes) + 8 * kColumns) * 4);
  for (Memory* memory : {&values, &gates, &weight, &vectors, &past, &state}) memory->fill(random);
  SmallStep step(kTokens);
  const Rows wide = rows_of(mixed, RowType::f32, kChannels);
  const CausalConvOp conv{rows_of(values, RowType::f32, kChannels),
                          wide,
                          weight.floats(),
                          nullptr,
                          KvLayer{past.data(), 0, kBlockSize, 1, 2, KvFormat::f32, 0},
                          kChannels,
                          4,
                          Activation::silu};
  run_op(ops, "causal_conv", conv, step.context());
  const auto part = [&](int64_t first) { return Rows{wide.data + 4 * first, wide.stride_bytes, RowType::f32}; };
  const float *rates = vectors.floats(), *bias = rates + kStateHeads, *skip = bias + kStateHeads;
  const RecurrenceOp recurrence{part(0),
                                part(kKeySize),
                                part(2 * kKeySize),
                                rows_of(gates, RowType::f32, 2 * kStateHeads),
                                rows_of(out, RowType::f32, kStateHeads * kValueSize),
                                rates,
                                bias,
                                skip,
                                KvLayer{state.data(), 0, kBlockSize, 1, 2, KvFormat::f32, 0},
                                0,
                                1,
                                kStateHeads,
                                kKeySize,
                                kValueSize,
                                delta};
  run_op(ops, "recurrence", recurrence, step.context());
  return out.bytes() + past.bytes() + state.bytes();
}

std::string sampling_results(const OpTable& ops) {
  constexpr int64_t kCount = 2 * kChunk + 3, kPadded = 3 * kChunk;
  Random random;
  Memory values(kPadded * 4), maxima(3 * kChunkMaxima * 4), floats(kPadded * 4), integers(kPadded * 8 + 24);
  values.fill(random);
  const Values row{values.floats(), kCount, maxima.floats()};
  const float max = ops.sampling.scan(row);
  const Weighing weighing{max, 9.0f, -8.0f, max - 5.0f, 1e-3f};
  auto* numbers = reinterpret_cast<int64_t*>(integers.data());
  std::string results = std::to_string(ops.sampling.weigh(row, weighing, floats.floats(), numbers));
  results += maxima.bytes() + floats.bytes() + std::to_string(ops.sampling.softmax_sum(row, weighing));
  results += std::to_string(ops.sampling.keep_before(row, floats.floats(), {row.x[300], 300}, numbers));
  results += std::to_string(ops.sampling.first_equal(row, max)) + integers.bytes();
  ops.sampling.weights(row.x, kCount, weighing, numbers);
  results += integers.bytes() + std::to_string(ops.sampling.count_above(row, max, 0.5f, -1.5f));
  results += std::to_string(ops.sampling.collect(row, max, 0.5f, -1.5f, reinterpret_cast<uint64_t*>(numbers)));
  results += std::to_string(ops.sampling.count_at_least(row.x, kCount / kChunkMaxima * kChunkMaxima, 0.25f));
  return results + integers.bytes();
}

// Whether floats are those wanted, up to 1/32 of the largest. AMX's attention rounds queries and weights to bf16, by
// 1/512 each; a wrong tile is off by as much as the results themselves.
bool are_near(const std::string& found, const std::string& wanted) {
  const auto value = [](const std::string& bytes, size_t i) {
    float one;
    std::memcpy(&one, bytes.data() + i * sizeof one, sizeof one);
    return one;
  };
  float largest = 0.0f;
  for (size_t i = 0; i < wanted.size() / 4; ++i) largest = std::max(largest, std::abs(value(wanted, i)));
  for (size_t i = 0; i < wanted.size() / 4; ++i) {
    if (!(std::abs(value(found, i) - value(wanted, i)) <= largest / 32)) return false;
  }
  return true;
}

// All quantisers, of values and weights that are all different.
std::string quantizer_results(const OpTable& ops) {
  Random random;
  std::string results;
  for (int i = 0; i < kNumQuantizers; ++i) {
    const BlockQuantizer& quantizer = ops.quantizers[i];
    Memory values(quantizer.len * 4), weights(quantizer.len * 4);
    values.fill(random);
    for (int k = 0; k < quantizer.len; ++k) weights.floats()[k] = std::abs(random.value());
    std::string block(quantizer.bytes, 0);
    quantizer.encode(values.floats(), weights.floats(), reinterpret_cast<std::byte*>(block.data()));
    results += block;
  }
  return results;
}

// AMX has bits of its own for bf16 weights, and for attention to bf16 and int8.
bool agree(const OpTable& ops, bool is_own, const std::string& found, const std::string& wanted) {
  return is_own && has_tiles(ops) ? are_near(found, wanted) : found == wanted;
}

struct Check {
  const char* name;
  bool is_own;  // see `agree`
  std::function<std::string(const OpTable&)> results;
};

std::vector<Check> checks(bool for_tiles) {
  constexpr struct {
    WeightFormat format;
    const char* name;
  } kGemms[] = {{WeightFormat::f32, "gemm of f32 weights"},     {WeightFormat::f16, "gemm of f16 weights"},
                {WeightFormat::bf16, "gemm of bf16 weights"},   {WeightFormat::q4, "gemm of q4 weights"},
                {WeightFormat::q4m, "gemm of q4m weights"},     {WeightFormat::q5, "gemm of q5 weights"},
                {WeightFormat::q5m, "gemm of q5m weights"},     {WeightFormat::q8, "gemm of q8 weights"},
                {WeightFormat::q4k, "gemm of q4k weights"},     {WeightFormat::q5k, "gemm of q5k weights"},
                {WeightFormat::q6k, "gemm of q6k weights"},     {WeightFormat::iq4nl, "gemm of iq4nl weights"},
                {WeightFormat::iq4xs, "gemm of iq4xs weights"}, {WeightFormat::mxfp4, "gemm of mxfp4 weights"},
                {WeightFormat::nvfp4, "gemm of nvfp4 weights"}};
  std::vector<Check> all;
  // Of few outputs the rows are cut into fewer than tile instructions are used for (ops/gemm.h).
  for (const auto& [format, name] : kGemms) {
    const bool wide = for_tiles && format != WeightFormat::f32 && format != WeightFormat::f16;
    const int64_t num_outputs = wide ? 250 : 48;
    all.push_back({name, format == WeightFormat::bf16, [format = format, num_outputs](const OpTable& ops) {
                     return gemm_results(ops, format, num_outputs);
                   }});
  }
  for (bool is_bf16 : {false, true}) {
    all.push_back({"lora", false, [is_bf16](const OpTable& ops) { return lora_results(ops, is_bf16); }});
  }
  all.push_back({"norm or activate", false, row_results});
  for (WeightFormat format : {WeightFormat::f32, WeightFormat::q8, WeightFormat::mxfp4}) {
    all.push_back({"route or experts", false, [format](const OpTable& ops) { return expert_results(ops, format); }});
  }
  all.push_back({"sampling", false, sampling_results});
  for (bool delta : {false, true}) {
    all.push_back(
        {"causal_conv or recurrence", false, [delta](const OpTable& ops) { return state_results(ops, delta); }});
  }
  for (KvFormat format : {KvFormat::f32, KvFormat::bf16, KvFormat::f16, KvFormat::e4m3, KvFormat::e5m2, KvFormat::i8}) {
    const bool is_own = format == KvFormat::bf16 || format == KvFormat::i8;
    all.push_back(
        {"write_kv or attend", is_own, [format](const OpTable& ops) { return attention_results(ops, format); }});
  }
  return all;
}

}  // namespace

std::string failing_op(const OpTable& ops) {
  for (const Check& check : checks(has_tiles(ops))) {
    if (!agree(ops, check.is_own, check.results(ops), check.results(scalar_ops()))) return check.name;
  }
  return "";
}

std::vector<ResultDigest> result_digests(const OpTable& ops) {
  std::vector<ResultDigest> digests;
  std::vector<Check> all = checks(false);
  all.push_back({"quantisers", false, quantizer_results});
  for (const Check& check : all) {
    uint64_t digest = 0xcbf29ce484222325u;  // FNV-1a
    for (const char byte : check.results(ops)) digest = (digest ^ static_cast<uint8_t>(byte)) * 0x100000001b3u;
    digests.push_back({check.name, digest});
  }
  return digests;
}

}  // namespace quire
