// The device's own kernels, where Paddle's fallback to the CPU is none.
#pragma once

namespace async_device {

void register_kernels();

}  // namespace async_device
