// The connections of a communicator's ranks, and a transfer over one of them, which both ends have to come to.
#pragma once
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

namespace async_device {

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Wire {
 public:
  Wire(const std::string& id, int size, int rank);

  // Block until the other end does the same; what it does otherwise is said and is a fault of both.
  void send(int peer, const std::string& kind, const void* memory, size_t bytes);
  void receive(int peer, const std::string& kind, void* memory, size_t bytes);
  void abort();  // ends what blocks
  bool is_aborted() const { return aborted_; }

  const int size, rank;
  std::atomic<long> bytes_sent{0};

 private:
  struct Header {
    char kind[24];
    size_t bytes;
  };
  void write(int socket, const void* data, size_t bytes);
  void read(int socket, void* data, size_t bytes);
  void agree(int socket, int peer, const std::string& verb, const std::string& kind, size_t bytes);
  [[noreturn]] void peer_is_gone();

  std::vector<int> to_, from_;  // a socket each way
  std::atomic<bool> aborted_{false};
};

}  // namespace async_device
