// Faults found in the program that uses the device: said on stderr, counted, readable by tests.
#pragma once
#include <atomic>
#include <string>

namespace async_device {

struct Counters {
  std::atomic<long> device_synchronizes{0}, stream_synchronizes{0}, event_synchronizes{0}, blocking_copies{0};
  std::atomic<long> races{0}, freed_in_use{0}, mismatches{0};
  std::atomic<long> allocated_bytes{0}, peak_bytes{0}, operations{0};

  static Counters& get() {
    static auto* counters = new Counters;
    return *counters;
  }
};

void report(std::atomic<long>& kind, const std::string& what);  // one fault
std::string reports();                                          // all that were reported
std::string this_thread();                                      // its name and number
std::string python_stack();                                     // of this thread; empty outside of Python

}  // namespace async_device
