#include "communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <map>
#include <thread>

#include "memory.h"
#include "settings.h"

namespace async_device {
namespace {

std::mutex made_mutex;
auto* made = new std::vector<Communicator*>;

int next_number(Communicator* communicator) {
  std::lock_guard<std::mutex> lock(made_mutex);
  made->push_back(communicator);
  return int(made->size()) - 1;
}

// What is written is not there until the stream has got it.
void poison(const std::vector<Access>& accesses) {
  for (auto& access : accesses) {
    if (!access.writes) continue;
    bool is_read = std::any_of(accesses.begin(), accesses.end(), [&](auto& other) { return !other.writes && other.at == access.at; });
    if (!is_read) Memory::get().poison(const_cast<void*>(access.at), access.bytes);
  }
}

}  // namespace

Communicator::Communicator(const std::string& id, int size, int rank) : number(next_number(this)), size(size), rank(rank), wire_(id, size, rank) {}

std::vector<Communicator*> Communicator::all() {
  std::lock_guard<std::mutex> lock(made_mutex);
  return *made;
}

Communicator::Group& Communicator::group() {
  static thread_local Group group;
  return group;
}

void Communicator::group_start() { ++group().depth; }

void Communicator::group_end() {
  if (--group().depth) return;
  Group whole = std::move(group());
  group() = {};
  for (auto& part : whole.parts) part.communicator->issue(std::move(part));
  for (auto& event : whole.events) {
    event.first->record(event.second);
    event.second->hold(false);
  }
}

void Communicator::record(Stream* stream, const std::shared_ptr<Event>& event) {
  auto& parts = group().parts;
  bool is_part = std::any_of(parts.begin(), parts.end(), [&](auto& part) { return std::count(part.streams.begin(), part.streams.end(), stream); });
  if (is_part && !Settings::get().early_events) {
    event->hold(true);
    group().events.emplace_back(stream, event);
  } else {
    stream->record(event);
  }
}

Communicator::Part& Communicator::part_of(Communicator* communicator, Stream* stream) {
  auto& parts = group().parts;
  auto part = std::find_if(parts.begin(), parts.end(), [&](auto& part) { return part.communicator == communicator; });
  if (part == parts.end()) part = parts.insert(part, Part{communicator, {}, {}, {}, {}, {}});
  if (!std::count(part->streams.begin(), part->streams.end(), stream)) part->streams.push_back(stream);
  return *part;
}

void Communicator::transfer(Stream* stream, Transfer transfer) {
  group_start();
  auto& part = part_of(this, stream);
  part.transfers.push_back(transfer);
  part.names.push_back((transfer.is_send ? "send of " : "receive of ") + std::to_string(transfer.bytes) + " bytes " +
                       (transfer.is_send ? "to rank " : "from rank ") + std::to_string(transfer.peer));
  part.accesses.push_back({transfer.memory, transfer.bytes, !transfer.is_send});
  group_end();
}

void Communicator::collective(Stream* stream, const std::string& name, std::vector<Access> accesses, std::function<void()> work) {
  group_start();
  auto& part = part_of(this, stream);
  part.collectives.push_back(std::move(work));
  part.names.push_back(name);
  part.accesses.insert(part.accesses.end(), accesses.begin(), accesses.end());
  group_end();
}

void Communicator::issue(Part part) {
  std::string name;
  for (auto& one : part.names) name += (name.empty() ? "" : " + ") + one;
  name += " (communicator " + std::to_string(number) + ")";
  Stream* first = part.streams.front();
  auto event = std::make_shared<Event>();
  for (auto* other : part.streams) {  // streams of one group wait for one another
    if (other == first) continue;
    other->record(event);
    first->wait_for(event);
  }
  poison(part.accesses);
  long mine;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    mine = issued_++;
  }
  first->add(name, part.accesses, [this, mine, transfers = std::move(part.transfers), collectives = std::move(part.collectives)] {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      while (!turn_.wait_for(lock, std::chrono::milliseconds(50), [&] { return next_ == mine; }) && !is_exiting()) {}
    }
    std::exception_ptr fault;
    try {
      move("send and receive", transfers);
      for (auto& work : collectives) work();
    } catch (...) {
      fault = std::current_exception();
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++next_;
      turn_.notify_all();
    }
    if (fault) std::rethrow_exception(fault);
  });
  if (part.streams.size() > 1) {
    auto end = std::make_shared<Event>();
    first->record(end);
    for (auto* other : part.streams)
      if (other != first) other->wait_for(end);
  }
}

void Communicator::move_one(const std::string& kind, const Transfer& transfer) {
  if (transfer.is_send) wire_.send(transfer.peer, kind, transfer.memory, transfer.bytes);
  else wire_.receive(transfer.peer, kind, transfer.memory, transfer.bytes);
}

// All edges at once, what goes over one edge in its order: the kth send meets the kth receive.
void Communicator::move(const std::string& kind, const std::vector<Transfer>& transfers) {
  std::map<std::pair<bool, int>, std::vector<Transfer>> edges;
  for (auto& transfer : transfers) edges[{transfer.is_send, transfer.peer}].push_back(transfer);
  auto &to_self = edges[{true, rank}], &from_self = edges[{false, rank}];
  if (to_self.size() != from_self.size()) throw Fault("a transfer to itself needs its send and its receive in one group");
  for (size_t i = 0; i < to_self.size(); ++i) {
    if (to_self[i].bytes != from_self[i].bytes) throw Fault("a transfer to itself has two sizes");
    std::memmove(from_self[i].memory, to_self[i].memory, to_self[i].bytes);
  }
  edges.erase({true, rank}), edges.erase({false, rank});
  std::vector<std::exception_ptr> faults(edges.size());
  std::vector<std::thread> threads;
  size_t n = 0;
  for (auto& edge : edges) {
    auto run = [this, &kind, &list = edge.second, &fault = faults[n++]] {
      try {
        for (auto& transfer : list) move_one(kind, transfer);
      } catch (...) {
        fault = std::current_exception();
      }
    };
    if (n == edges.size()) run();
    else threads.emplace_back(run);
  }
  for (auto& thread : threads) thread.join();
  for (auto& fault : faults)
    if (fault) std::rethrow_exception(fault);
}

std::vector<std::vector<char>> Communicator::gather(const std::string& kind, const void* mine, size_t bytes) {
  std::vector<std::vector<char>> all(wire_.size, std::vector<char>(bytes));
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    transfers.push_back({true, const_cast<void*>(mine), bytes, peer});
    transfers.push_back({false, all[size_t(peer)].data(), bytes, peer});
  }
  std::memcpy(all[size_t(rank)].data(), mine, bytes);
  move(kind, transfers);
  return all;
}

void Communicator::abort() { wire_.abort(); }

}  // namespace async_device
