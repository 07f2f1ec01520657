// The device's memory: allocations of its own, full of NaN until written, and which of it is in use by a stream.
#pragma once
#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "checker.h"

namespace async_device {

const int kPoison = 0xff;  // NaN in every float type, -1 in the integers

class Memory {
 public:
  static Memory& get() {
    static auto* memory = new Memory;
    return *memory;
  }

  void* allocate(int device, size_t bytes);
  // The caller says that the calculation stream has issued its last use: freed in that stream's order, as a caching allocator does.
  void release(int device, void* at, size_t bytes);
  bool is_mine(const void* at, size_t bytes);

  long begin_use(std::vector<Access> accesses);  // a queued operation's
  void end_use(long use);
  // Fills it with NaN, if no operation under way still uses it; otherwise the operation that will write it has to.
  bool poison(void* at, size_t bytes);

 private:
  bool is_used(const void* at, size_t bytes) const;

  struct Block {
    size_t bytes;
    int device;
  };
  std::mutex mutex_;
  std::map<const char*, Block> blocks_;
  std::map<long, std::vector<Access>> uses_;
  std::vector<std::pair<char*, size_t>> leaving_;  // freed, but a stream still has to come to its last use
  long next_use_ = 1;
};

}  // namespace async_device
