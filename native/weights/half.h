// fp16 and bf16 for code that uses no instructions for them. Static: each instruction set has its own copy.
#pragma once
#include <cstdint>
#include <cstring>

namespace quire {

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
static inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The scale of doubled floats is half of 2^(exponent - 127); denormal ones become 0.
static inline uint8_t halved(uint8_t exponent) { return static_cast<uint8_t>(exponent == 0 ? 0 : exponent - 1); }

static inline float from_bf16(uint16_t half) { return float_of_bits(static_cast<uint32_t>(half) << 16); }

// Nearest, ties to even; NaN stays NaN.
static inline uint16_t round_to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

static inline float from_f16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  // Exponent and fraction moved to fp32's places; 2^112 corrects the exponent's bias, of denormals too.
  const float scaled = float_of_bits(magnitude << 13) * 0x1p112f;
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  return float_of_bits(sign | (magnitude >= 0x7c00u ? special : bits_of(scaled)));
}

// Nearest, ties to even; NaN stays NaN, what is too large becomes infinity.
static inline uint16_t round_to_f16(float value) {
  const uint32_t sign = (bits_of(value) >> 16) & 0x8000u, magnitude = bits_of(value) & 0x7fffffffu;
  // Adding a power of two whose last bit is worth half's last bit makes the addition round: for normal results
  // 2^13 times the value's own power, for denormals 0.5.
  const uint32_t exponent = magnitude & 0x7f800000u, least = 0x38800000u;  // 2^-14, half's smallest normal
  const float power = float_of_bits((exponent > least ? exponent : least) + (13u << 23));
  const float rounded = magnitude >= 0x47800000u ? 0.0f : (float_of_bits(magnitude) + power) - power;
  const uint32_t normal = (bits_of(rounded) - 0x38000000u) >> 13;
  const uint32_t denormal = static_cast<uint32_t>(rounded * 0x1p24f);
  uint32_t half = rounded >= 0x1p-14f ? normal : denormal;
  if (magnitude >= 0x47800000u) half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;  // from 65536 on
  return static_cast<uint16_t>(sign | half);
}

}  // namespace quire
