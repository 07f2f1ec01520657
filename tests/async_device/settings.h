// What the environment asks of the device. Read once; README.md lists it.
#pragma once
#include <cstdlib>
#include <cstring>

namespace async_device {

struct Settings {
  unsigned seed = 1;
  unsigned delay_us = 0;          // the longest delay before an operation
  bool early_events = false;      // Paddle 2.6.2's fault: an event recorded in a group does not come behind its transfers
  bool abort_on_report = false;   // end the process at the first report
  bool stacks = false;            // keep the Python stack of each operation, for reports (slow)
  bool strict_gather = false;     // do not order the calculation stream behind an all_gather (see collectives.cc)
  bool check = true;              // look for races

  static const Settings& get() {
    static const Settings* settings = new Settings(read());
    return *settings;
  }

 private:
  static Settings read() {
    Settings s;
    s.seed = unsigned(number("ASYNC_DEVICE_SEED", s.seed));
    s.delay_us = unsigned(number("ASYNC_DEVICE_DELAY_US", s.delay_us));
    s.early_events = is("ASYNC_DEVICE_EVENTS", "early");
    s.abort_on_report = is("ASYNC_DEVICE_ABORT", "1");
    s.stacks = is("ASYNC_DEVICE_STACKS", "1");
    s.strict_gather = is("ASYNC_DEVICE_GATHER", "strict");
    s.check = !is("ASYNC_DEVICE_CHECK", "0");
    return s;
  }
  static bool is(const char* name, const char* value) {
    const char* set = std::getenv(name);
    return set && !std::strcmp(set, value);
  }
  static long number(const char* name, long otherwise) {
    const char* set = std::getenv(name);
    return set ? std::atol(set) : otherwise;
  }
};

}  // namespace async_device
