#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "report.h"
#include "streams.h"

namespace async_device {
namespace {

bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  auto *x = static_cast<const char*>(a), *y = static_cast<const char*>(b);
  return x < y + b_bytes && y < x + a_bytes;
}

}  // namespace

void* Memory::allocate(int device, size_t bytes) {
  size_t whole = std::max<size_t>(256, (bytes + 255) / 256 * 256);
  auto* at = static_cast<char*>(std::aligned_alloc(256, whole));
  if (!at) return nullptr;
  std::memset(at, kPoison, whole);
  Checker::get().forget(at, whole);
  auto& counters = Counters::get();
  long now = counters.allocated_bytes += long(bytes);
  for (long peak = counters.peak_bytes; peak < now && !counters.peak_bytes.compare_exchange_weak(peak, now);) {}
  std::lock_guard<std::mutex> lock(mutex_);
  blocks_[at] = {bytes, device};
  return at;
}

void Memory::release(int device, void* at, size_t bytes) {
  auto streams = Stream::all(device);
  if (!is_exiting() && !streams.empty()) Checker::get().free(streams.front()->number, at, bytes);
  Counters::get().allocated_bytes -= long(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  auto* block = static_cast<char*>(at);
  blocks_.erase(block);
  if (is_used(at, bytes)) {
    leaving_.emplace_back(block, bytes);
  } else {
    std::memset(at, kPoison, bytes);
    std::free(at);
  }
}

bool Memory::is_mine(const void* at, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto* from = static_cast<const char*>(at);
  auto block = blocks_.upper_bound(from);
  if (block == blocks_.begin()) return false;
  --block;
  return from + bytes <= block->first + block->second.bytes;
}

long Memory::begin_use(std::vector<Access> accesses) {
  std::lock_guard<std::mutex> lock(mutex_);
  uses_[next_use_] = std::move(accesses);
  return next_use_++;
}

void Memory::end_use(long use) {
  std::lock_guard<std::mutex> lock(mutex_);
  uses_.erase(use);
  auto is_free = [&](auto& block) {
    if (is_used(block.first, block.second)) return false;
    std::memset(block.first, kPoison, block.second);
    std::free(block.first);
    return true;
  };
  leaving_.erase(std::remove_if(leaving_.begin(), leaving_.end(), is_free), leaving_.end());
}

bool Memory::poison(void* at, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_used(at, bytes)) return false;
  std::memset(at, kPoison, bytes);
  return true;
}

bool Memory::is_used(const void* at, size_t bytes) const {
  for (auto& use : uses_)
    for (auto& access : use.second)
      if (overlap(access.at, access.bytes, at, bytes)) return true;
  return false;
}

}  // namespace async_device
