#include "reduction.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace async_device {
namespace {

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct BFloat16 {
  uint16_t bits;
  operator float() const { return float_of(uint32_t(bits) << 16); }
  BFloat16& operator=(float value) {
    uint32_t wide = bits_of(value);
    bits = value != value ? 0x7fc0 : uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
    return *this;
  }
};

struct Float16 {  // by hand: not every compiler has a type for it
  uint16_t bits;
  operator float() const {
    uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    if (exponent == 31) return float_of(sign | 0x7f800000 | fraction << 13);
    if (exponent) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    float small = float(fraction) * float_of(0x33800000);  // 2^-24
    return sign ? -small : small;
  }
  Float16& operator=(float value) {
    uint32_t wide = bits_of(value), sign = wide >> 16 & 0x8000, size = wide & 0x7fffffff;
    if (size > 0x7f800000) bits = uint16_t(sign | 0x7e00);
    else if (size >= 0x477ff000) bits = uint16_t(sign | 0x7c00);  // rounds to more than 65504
    else if (size < 0x38800000) bits = uint16_t(sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000));  // subnormal: 0.5's last bit is 2^-24
    else bits = uint16_t(sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - 0x1c000));
    return *this;
  }
};

template <typename Wide>
Wide combine(C_CCLReduceOp op, Wide a, Wide b) {
  switch (op) {
    case MAX: return std::max(a, b);
    case MIN: return std::min(a, b);
    case PRODUCT: return Wide(a * b);
    default: return Wide(a + b);
  }
}

template <typename T, typename Wide>
void reduce_as(const std::vector<const void*>& from, C_CCLReduceOp op, size_t count, void* to) {
  for (size_t i = 0; i < count; ++i) {
    Wide value = Wide(static_cast<const T*>(from[0])[i]);
    for (size_t r = 1; r < from.size(); ++r) value = combine<Wide>(op, value, Wide(static_cast<const T*>(from[r])[i]));
    static_cast<T*>(to)[i] = op == AVG ? Wide(value / Wide(from.size())) : value;
  }
}

}  // namespace

size_t bytes_of(C_DataType type) {
  switch (type) {
    case BOOL: case UINT8: case INT8: return 1;
    case UINT16: case INT16: case FLOAT16: case BFLOAT16: return 2;
    case UINT32: case INT32: case FLOAT32: return 4;
    case UINT64: case INT64: case FLOAT64: case COMPLEX64: return 8;
    case COMPLEX128: return 16;
    default: throw std::runtime_error("a type without a size");
  }
}

double value_at(const void* memory, C_DataType type, size_t i) {
  switch (type) {
    case FLOAT16: return static_cast<const Float16*>(memory)[i];
    case BFLOAT16: return static_cast<const BFloat16*>(memory)[i];
    case FLOAT32: return static_cast<const float*>(memory)[i];
    case FLOAT64: return static_cast<const double*>(memory)[i];
    default: throw std::runtime_error("no float");
  }
}

void set_value(void* memory, C_DataType type, size_t i, double value) {
  switch (type) {
    case FLOAT16: static_cast<Float16*>(memory)[i] = float(value); return;
    case BFLOAT16: static_cast<BFloat16*>(memory)[i] = float(value); return;
    case FLOAT32: static_cast<float*>(memory)[i] = float(value); return;
    case FLOAT64: static_cast<double*>(memory)[i] = value; return;
    default: throw std::runtime_error("no float");
  }
}

void reduce(const std::vector<const void*>& from, C_DataType type, C_CCLReduceOp op, size_t count, void* to) {
  switch (type) {
    case FLOAT16: return reduce_as<Float16, float>(from, op, count, to);
    case BFLOAT16: return reduce_as<BFloat16, float>(from, op, count, to);
    case FLOAT32: return reduce_as<float, float>(from, op, count, to);
    case FLOAT64: return reduce_as<double, double>(from, op, count, to);
    case INT8: return reduce_as<int8_t, int8_t>(from, op, count, to);
    case BOOL: case UINT8: return reduce_as<uint8_t, uint8_t>(from, op, count, to);
    case INT16: return reduce_as<int16_t, int16_t>(from, op, count, to);
    case UINT16: return reduce_as<uint16_t, uint16_t>(from, op, count, to);
    case INT32: return reduce_as<int32_t, int32_t>(from, op, count, to);
    case UINT32: return reduce_as<uint32_t, uint32_t>(from, op, count, to);
    case INT64: return reduce_as<int64_t, int64_t>(from, op, count, to);
    case UINT64: return reduce_as<uint64_t, uint64_t>(from, op, count, to);
    default: throw std::runtime_error("no reduction of this type");
  }
}

}  // namespace async_device
