// A communicator and groups: what is issued on one is done in the order of issue; what stands in a group moves together.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "streams.h"
#include "wire.h"

namespace async_device {

struct Transfer {
  bool is_send;
  void* memory;
  size_t bytes;
  int peer;
};

class Communicator {
 public:
  Communicator(const std::string& id, int size, int rank);

  // One operation: issued at once, or with the others of the open group of this thread.
  void transfer(Stream* stream, Transfer transfer);
  void collective(Stream* stream, const std::string& name, std::vector<Access> accesses, std::function<void()> work);

  // For the work of a collective, on the stream's thread:
  void move(const std::string& kind, const std::vector<Transfer>& transfers);
  std::vector<std::vector<char>> gather(const std::string& kind, const void* mine, size_t bytes);  // by rank

  void abort();
  long bytes_sent() const { return wire_.bytes_sent; }
  static std::vector<Communicator*> all();
  static void group_start();
  static void group_end();
  // What is recorded on a stream that has a part in the open group comes behind the group, as NCCL's events do.
  static void record(Stream* stream, const std::shared_ptr<Event>& event);

  const int number, size, rank;

 private:
  struct Part {  // what a group has for one communicator
    Communicator* communicator;
    std::vector<Stream*> streams;
    std::vector<Transfer> transfers;
    std::vector<std::function<void()>> collectives;
    std::vector<std::string> names;
    std::vector<Access> accesses;
  };
  struct Group {
    int depth = 0;
    std::vector<Part> parts;
    std::vector<std::pair<Stream*, std::shared_ptr<Event>>> events;
  };
  static Group& group();
  static Part& part_of(Communicator* communicator, Stream* stream);
  void issue(Part part);
  void move_one(const std::string& kind, const Transfer& transfer);

  Wire wire_;
  std::mutex mutex_;
  std::condition_variable turn_;
  long issued_ = 0, next_ = 0;
};

}  // namespace async_device
