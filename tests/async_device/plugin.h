// What all parts of the interface need of the plug-in itself.
#pragma once
#include <cstdio>
#include <exception>

#include "paddle/phi/backends/device_ext.h"

namespace async_device {

template <typename Work>
C_Status guarded(Work work) {
  try {
    work();
    return C_SUCCESS;
  } catch (const std::exception& fault) {
    std::fprintf(stderr, "async_device: %s\n", fault.what());
    return C_ERROR;
  }
}

// From exit() on nothing shall block. What is registered last is called first: so this is called again after Paddle may
// have made objects whose end waits for the device.
void exit_first();

// What this thread calls is no copy: if it has waited for a stream just before, that was a synchronize.
void settle();

}  // namespace async_device
