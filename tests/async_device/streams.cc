#include "streams.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <map>
#include <random>
#include <thread>

#include "memory.h"
#include "report.h"
#include "settings.h"

namespace async_device {
namespace {

std::atomic<bool> exiting{false};
std::mutex streams_mutex;
auto* streams = new std::map<int, std::vector<Stream*>>;  // by device; never destroyed, their threads wait on them for ever

const auto tick = std::chrono::milliseconds(50);  // so that an exit is seen by who waits

// Holds the caller until the condition is true or the process ends.
template <typename Condition>
void hold(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, Condition condition) {
  while (!exiting && !changed.wait_for(lock, tick, condition)) {}
}

// Each stream has a sequence of its own, so that a seed gives the same delays whichever thread comes first.
void delay(std::mt19937& random) {
  if (unsigned most = Settings::get().delay_us) std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
}

}  // namespace

void let_exit() { exiting = true; }
bool is_exiting() { return exiting; }

Stream::Stream(int device) : number(Checker::get().add_stream()), device(device) {
  std::thread([this] { run(); }).detach();
}

void Stream::queue(Item item) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(item));
  ++added_;
  ++Counters::get().operations;
  changed_.notify_all();
}

void Stream::add(const std::string& name, std::vector<Access> accesses, std::function<void()> work) {
  Checker::get().issue(number, name, accesses);
  long use = Memory::get().begin_use(accesses);
  queue({std::move(work), true, use});
}

void Stream::add_silently(std::function<void()> work) { queue({std::move(work), false, 0}); }

void Stream::record(const std::shared_ptr<Event>& event) {
  Checker::get().issue(number, "event", {});
  long mark = event->record(Checker::get().now(number));
  add_silently([event, mark] { event->reach(mark); });
}

void Stream::wait_for(const std::shared_ptr<Event>& event) {
  auto [mark, clock] = event->last();  // the latest record at this moment; none: nothing to wait for
  Checker::get().learn(number, clock);
  add_silently([event = event, mark = mark] { event->wait(mark); });
}

bool Stream::finish() {
  std::unique_lock<std::mutex> lock(mutex_);
  long all = added_;
  hold(lock, changed_, [&] { return done_ >= all; });
  return error_.empty();
}

bool Stream::synchronize() {
  Clock clock = Checker::get().now(number);
  bool is_right = finish();
  Checker::get().host_learns(clock);
  return is_right;
}

bool Stream::is_idle() {
  Clock clock = Checker::get().now(number);
  std::lock_guard<std::mutex> lock(mutex_);
  if (done_ < added_) return false;
  Checker::get().host_learns(clock);
  return true;
}

std::string Stream::error() {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void Stream::run() {
  std::mt19937 random(Settings::get().seed * 1000003u + unsigned(number));
  for (;;) {
    Item item;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty(); });
      item = std::move(queue_.front());
      queue_.pop_front();
    }
    if (item.delayed) delay(random);
    std::string error;
    try {
      item.work();
    } catch (const std::exception& fault) {
      error = fault.what();
    }
    item.work = nullptr;  // before it counts as done: what it holds may be asked for
    if (item.use) Memory::get().end_use(item.use);
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error.empty() && error_.empty()) error_ = error;
    ++done_;
    --Counters::get().operations;
    changed_.notify_all();
  }
}

Stream* Stream::make(int device) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  auto* stream = new Stream(device);
  (*streams)[device].push_back(stream);
  return stream;
}

Stream* Stream::calculation(int device) {
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    auto& made = (*streams)[device];
    if (!made.empty()) return made.front();
  }
  return make(device);
}

Stream* Stream::of(C_Stream stream, int device) { return stream ? reinterpret_cast<Stream*>(stream) : calculation(device); }

std::vector<Stream*> Stream::all(int device) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  return (*streams)[device];
}

void Stream::clear_errors() {
  std::lock_guard<std::mutex> lock(streams_mutex);
  for (auto& on_device : *streams)
    for (auto* stream : on_device.second) {
      std::lock_guard<std::mutex> own(stream->mutex_);
      stream->error_.clear();
    }
}

long Event::record(Clock clock) {
  std::lock_guard<std::mutex> lock(mutex_);
  clock_ = std::move(clock);
  return ++recorded_;
}

void Event::reach(long number) {
  std::lock_guard<std::mutex> lock(mutex_);
  done_ = std::max(done_, number);
  changed_.notify_all();
}

void Event::hold(bool held) {
  std::lock_guard<std::mutex> lock(mutex_);
  held_ += held ? 1 : -1;
}

std::pair<long, Clock> Event::last() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {recorded_, clock_};
}

void Event::wait(long number) {
  std::unique_lock<std::mutex> lock(mutex_);
  async_device::hold(lock, changed_, [&] { return done_ >= number; });
}

bool Event::is_done() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (held_ || done_ < recorded_) return false;
  Clock clock = clock_;
  lock.unlock();
  Checker::get().host_learns(clock);
  return true;
}

}  // namespace async_device
