#include "checker.h"

#include <algorithm>

#include "report.h"
#include "settings.h"

namespace async_device {
namespace {

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

std::string hex(uintptr_t at) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%zx", size_t(at));
  return text;
}

std::shared_ptr<const std::string> named(const std::string& name) {
  std::string stack = Settings::get().stacks ? python_stack() : "";
  return std::make_shared<const std::string>(stack.empty() ? name : name + ", issued at\n" + stack);
}

std::string stream_name(int stream) { return "stream " + std::to_string(stream); }

}  // namespace

int Checker::add_stream() {
  std::lock_guard<std::mutex> lock(mutex_);
  streams_.emplace_back();
  return int(streams_.size()) - 1;
}

Clock& Checker::clock_of(int stream) {
  Clock& clock = streams_[size_t(stream)];
  if (clock.size() < streams_.size()) clock.resize(streams_.size());
  return clock;
}

void Checker::issue(int stream, const std::string& name, const std::vector<Access>& accesses) {
  if (!Settings::get().check) return;
  std::lock_guard<std::mutex> lock(mutex_);
  Clock& clock = clock_of(stream);
  join(clock, host_);
  Operation operation{stream, ++clock[size_t(stream)], named(name)};
  for (auto& access : accesses) check(operation, clock, access, false);
}

void Checker::host(const std::string& name, const std::vector<Access>& accesses) {
  if (!Settings::get().check) return;
  std::lock_guard<std::mutex> lock(mutex_);
  Operation operation{-1, 0, named(name)};
  for (auto& access : accesses) check(operation, host_, access, false);
}

void Checker::free(int stream, const void* at, size_t bytes) {
  if (!Settings::get().check) return;
  std::lock_guard<std::mutex> lock(mutex_);
  Clock clock = clock_of(stream);
  join(clock, host_);
  check({stream, clock[size_t(stream)], named("free")}, clock, {at, bytes, true}, true);
}

void Checker::forget(const void* at, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto from = reinterpret_cast<uintptr_t>(at);
  auto first = split(from), last = split(from + bytes);
  ranges_.erase(first, last);
}

Clock Checker::now(int stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  return clock_of(stream);
}

void Checker::learn(int stream, const Clock& clock) {
  std::lock_guard<std::mutex> lock(mutex_);
  join(clock_of(stream), clock);
}

void Checker::host_learns(const Clock& clock) {
  std::lock_guard<std::mutex> lock(mutex_);
  join(host_, clock);
}

// No range lies across `at` any more; the first one that begins there or behind.
Checker::Ranges::iterator Checker::split(uintptr_t at) {
  auto next = ranges_.lower_bound(at);
  if (next == ranges_.begin() || (next != ranges_.end() && next->first == at)) return next;
  auto before = std::prev(next);
  if (before->second.end <= at) return next;
  Range rest = before->second;
  before->second.end = at;
  return ranges_.emplace_hint(next, at, std::move(rest));
}

void Checker::check(const Operation& operation, const Clock& clock, const Access& access, bool frees) {
  if (!access.bytes) return;
  auto behind = [&](const Operation& earlier) {
    auto stream = size_t(earlier.stream);
    return earlier.stream < 0 || (stream < clock.size() && clock[stream] >= earlier.time);
  };
  auto from = reinterpret_cast<uintptr_t>(access.at), end = from + access.bytes;
  auto at = split(from);
  split(end);
  bool is_said = false;  // one report for an operation is enough
  auto look_at = [&](const Operation& earlier) {
    if (is_said || !earlier.name || behind(earlier)) return;
    say(operation, earlier, frees, from, access.bytes);
    is_said = true;
  };
  for (uintptr_t here = from; here < end; ++at) {
    if (at == ranges_.end() || at->first > here) {  // nothing is known of what comes next
      uintptr_t to = at == ranges_.end() ? end : std::min(end, at->first);
      at = ranges_.emplace_hint(at, here, Range{to, {-1, 0, nullptr}, {}});
    }
    Range& range = at->second;
    look_at(range.write);
    if (access.writes) {
      for (auto& read : range.reads) look_at(read);
      range.write = operation;
      range.reads.clear();
    } else {
      auto same = std::find_if(range.reads.begin(), range.reads.end(), [&](auto& read) { return read.stream == operation.stream; });
      if (same == range.reads.end()) range.reads.push_back(operation);
      else *same = operation;
    }
    here = range.end;
  }
}

void Checker::say(const Operation& operation, const Operation& earlier, bool frees, uintptr_t at, size_t bytes) {
  std::string where = std::to_string(bytes) + " bytes at " + hex(at);
  std::string other = *earlier.name + " on " + stream_name(earlier.stream);
  std::string stack = Settings::get().stacks ? "" : python_stack();
  if (!stack.empty()) stack = "\nThis was called in\n" + stack;
  if (frees) {
    report(Counters::get().freed_in_use, "freed while in use: " + where + ", freed by " + this_thread() + ", are used by " + other +
           ", which " + stream_name(operation.stream) + ", where the memory comes from, has not waited for" + stack);
  } else {
    std::string who = operation.stream < 0 ? "the host" : stream_name(operation.stream);
    report(Counters::get().races, "race: " + *operation.name + " on " + who + " uses " + where +
           " without having waited for " + other + " (issued by " + this_thread() + ")" + stack);
  }
}

}  // namespace async_device
