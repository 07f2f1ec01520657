// The xccl_* part of Paddle's device interface.
#pragma once
#include "paddle/phi/backends/device_ext.h"

namespace async_device {

void set_collectives(C_DeviceInterface* interface);

}  // namespace async_device
