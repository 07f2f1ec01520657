// Streams and events: a stream is a thread that does what is queued on it in order, each after a seeded delay.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "checker.h"
#include "paddle/phi/backends/device_ext.h"

namespace async_device {

class Event;

class Stream {
 public:
  explicit Stream(int device);

  // Queues it. The accesses are checked, and the memory is in use until it is done. What throws leaves its message as the stream's error.
  void add(const std::string& name, std::vector<Access> accesses, std::function<void()> work);
  void add_silently(std::function<void()> work);  // waits and events: they touch no memory
  void record(const std::shared_ptr<Event>& event);
  void wait_for(const std::shared_ptr<Event>& event);
  bool synchronize();  // the host waits; false if the stream has an error
  bool finish();       // the same, but the host's clock learns nothing
  bool is_idle();
  std::string error();

  static Stream* of(C_Stream stream, int device = 0);
  static Stream* calculation(int device);  // the first one that was made on it, as Paddle does
  static std::vector<Stream*> all(int device);
  static Stream* make(int device);
  static void clear_errors();

  const int number, device;

 private:
  struct Item {
    std::function<void()> work;
    bool delayed;
    long use;  // of memory
  };
  void queue(Item item);
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;
  long added_ = 0, done_ = 0;
  std::string error_;
};

class Event {
 public:
  long record(Clock clock);  // the number of this record
  void reach(long number);
  void hold(bool held);      // recorded in a group that is not yet issued
  std::pair<long, Clock> last();
  void wait(long number);
  bool is_done();

  static const std::shared_ptr<Event>& of(C_Event event) { return *reinterpret_cast<std::shared_ptr<Event>*>(event); }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  long recorded_ = 0, done_ = 0, held_ = 0;
  Clock clock_;
};

void let_exit();   // from now on nothing blocks the host: the process ends
bool is_exiting();

}  // namespace async_device
