// Says of each access of the device's memory whether it is ordered behind the earlier ones it conflicts with.
//
// Every stream has a clock: for each stream, up to which of its operations it comes behind. Streams learn from events
// that they wait for, the host from what it synchronizes, and an operation from the host that issues it. The order is
// the issue's, so that a forgotten wait is found each time, however the streams happen to run.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace async_device {

using Clock = std::vector<uint64_t>;  // by stream

struct Access {
  const void* at;
  size_t bytes;
  bool writes;
};

class Checker {
 public:
  static Checker& get() {
    static auto* checker = new Checker;
    return *checker;
  }

  int add_stream();                                                                         // its number
  void issue(int stream, const std::string& operation, const std::vector<Access>& accesses);
  void host(const std::string& operation, const std::vector<Access>& accesses);             // the host itself, at once
  void free(int stream, const void* at, size_t bytes);  // by stream order: as if the stream wrote there
  void forget(const void* at, size_t bytes);            // the memory is new
  Clock now(int stream);                                // for an event
  void learn(int stream, const Clock& clock);           // the stream waits for it
  void host_learns(const Clock& clock);                 // the host has waited for it

 private:
  struct Operation {
    int stream;
    uint64_t time;
    std::shared_ptr<const std::string> name;
  };
  struct Range {  // what was done last with the bytes up to `end`
    uintptr_t end;
    Operation write{-1, 0, nullptr};
    std::vector<Operation> reads;
  };
  using Ranges = std::map<uintptr_t, Range>;

  Ranges::iterator split(uintptr_t at);
  void check(const Operation& operation, const Clock& clock, const Access& access, bool frees);
  void say(const Operation& operation, const Operation& earlier, bool frees, uintptr_t at, size_t bytes);
  Clock& clock_of(int stream);

  std::mutex mutex_;
  std::vector<Clock> streams_;
  Clock host_;
  Ranges ranges_;
};

}  // namespace async_device
