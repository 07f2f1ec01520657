// Sizes and values of Paddle's types, and reductions over the ranks' values, in the order of the ranks.
#pragma once
#include <cstddef>
#include <vector>

#include "paddle/phi/backends/device_ext.h"

namespace async_device {

size_t bytes_of(C_DataType type);
double value_at(const void* memory, C_DataType type, size_t i);  // of floats
void set_value(void* memory, C_DataType type, size_t i, double value);
void reduce(const std::vector<const void*>& from, C_DataType type, C_CCLReduceOp op, size_t count, void* to);

}  // namespace async_device
