// `add` is the one kernel that Paddle calls by itself, past its fallback: it adds a gradient to a leaf's. Without one of the
// device's it takes the CPU's, which then works on the device's memory at once, whatever stands on the stream.
#include "kernels.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "paddle/phi/capi/include/c_kernel_registry.h"
#include "plugin.h"
#include "reduction.h"
#include "streams.h"

namespace async_device {
namespace {

using Sizes = std::vector<int64_t>;

int64_t product(const Sizes& sizes) {
  int64_t all = 1;
  for (int64_t size : sizes) all *= size;
  return all;
}

template <typename Question, typename... Arguments>
auto ask(Question question, Arguments... arguments) {
  PD_Status status = C_SUCCESS;
  auto answer = question(arguments..., &status);
  if (status != C_SUCCESS) throw std::runtime_error("a kernel's tensor or context does not answer");
  return answer;
}

Sizes sizes_of(const PD_Tensor* tensor) {
  Sizes sizes(size_t(ask(PD_TensorGetNumDims, tensor)));
  for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = ask(PD_TensorGetDim, tensor, i);
  return sizes;
}

struct Operand {
  C_DataType type;
  Sizes sizes;
  const void* memory;
  explicit Operand(const PD_Tensor* tensor) : type(ask(PD_TensorGetPDDataType, tensor)), sizes(sizes_of(tensor)), memory(nullptr) {
    if (product(sizes)) memory = ask(PD_TensorGetDataPointer, tensor);
  }
  size_t bytes() const { return size_t(product(sizes)) * bytes_of(type); }
  // Of the value that meets the result's i-th: missing sizes, and those of one, are repeated.
  size_t place(size_t i, const Sizes& result) const {
    size_t at = 0, step = 1;
    for (size_t back = 1; back <= sizes.size(); ++back) {
      auto size = size_t(sizes[sizes.size() - back]), whole = size_t(result[result.size() - back]);
      if (size > 1) at += i % whole * step;
      i /= whole;
      step *= size;
    }
    return at;
  }
  double value(size_t i, const Sizes& result) const { return value_at(memory, type, sizes == result ? i : place(i, result)); }
};

// The sum of two values in double, rounded once more, is what their own type gives.
void add(const PD_DeviceContext* context, const PD_Tensor* x_tensor, const PD_Tensor* y_tensor, PD_Tensor* sum) {
  settle();
  Operand x(x_tensor), y(y_tensor);
  C_DataType type = x.type;
  Sizes sizes = sizes_of(sum);
  size_t count = size_t(product(sizes)), bytes = count * bytes_of(type);
  void* to = ask(PD_DeviceContextAllocateTensor, context, sum, size_t(0), type);
  if (!count) return;
  auto* stream = Stream::of(ask(PD_DeviceContextGetStream, context));
  std::vector<Access> accesses{{to, bytes, true}};
  for (auto* operand : {&x, &y})
    if (operand->memory != to) accesses.push_back({operand->memory, operand->bytes(), false});
  stream->add("add of " + std::to_string(bytes) + " bytes", accesses, [=] {
    for (size_t i = 0; i < count; ++i) set_value(to, type, i, x.value(i, sizes) + y.value(i, sizes));
  });
}

void add_in_context(PD_KernelContext* context) {  // a static program's call
  add(PD_KernelContextGetDeviceContext(context), PD_KernelContextInputAt(context, 0), PD_KernelContextInputAt(context, 1),
      PD_KernelContextOutputAt(context, 0));
}

}  // namespace

void register_kernels() {
  static PD_KernelArgumentType in[] = {PD_ARG_TYPE_CONTEXT, PD_ARG_TYPE_TENSOR, PD_ARG_TYPE_TENSOR}, out[] = {PD_ARG_TYPE_TENSOR};
  for (C_DataType type : {FLOAT16, BFLOAT16, FLOAT32, FLOAT64})
    PD_RegisterPhiKernel("add", "async_device", type, ALL_LAYOUT, 3, in, 0, nullptr, 1, out, [](const PD_KernelKey*, PD_Kernel*) {}, add_in_context,
                         reinterpret_cast<void*>(add));
}

}  // namespace async_device
