#include "wire.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>

#include "report.h"
#include "streams.h"

namespace async_device {
namespace {

struct Address {  // a name in the kernel's abstract space: no file is left behind
  sockaddr_un at{};
  socklen_t length;
  Address(const std::string& id, int rank) {
    std::string name = id + "." + std::to_string(rank);
    at.sun_family = AF_UNIX;
    std::memcpy(at.sun_path + 1, name.data(), name.size());
    length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&at); }
};

int dial(const Address& address) {
  for (;;) {
    int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!::connect(socket, address.get(), address.length)) return socket;
    ::close(socket);
    if (is_exiting()) throw Fault("the process ends");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace

Wire::Wire(const std::string& id, int size, int rank) : size(size), rank(rank), to_(size_t(size), -1), from_(size_t(size), -1) {
  int server = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  Address mine(id, rank);
  if (::bind(server, mine.get(), mine.length) || ::listen(server, 2 * size)) throw Fault("rank " + std::to_string(rank) + " cannot listen as " + id);
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    int socket = to_[size_t(peer)] = dial(Address(id, peer));
    write(socket, &rank, sizeof rank);
  }
  for (int n = 1; n < size; ++n) {
    int socket = ::accept(server, nullptr, nullptr), peer;
    read(socket, &peer, sizeof peer);
    from_[size_t(peer)] = socket;
  }
  ::close(server);
}

// As NCCL: a peer that has died is waited for until somebody aborts.
void Wire::peer_is_gone() {
  while (!aborted_ && !is_exiting()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  throw Fault("communicator aborted");
}

void Wire::write(int socket, const void* data, size_t bytes) {
  for (auto* at = static_cast<const char*>(data); bytes;) {
    ssize_t n = ::send(socket, at, bytes, MSG_NOSIGNAL);
    if (n <= 0) peer_is_gone();
    at += n, bytes -= size_t(n);
  }
}

void Wire::read(int socket, void* data, size_t bytes) {
  for (auto* at = static_cast<char*>(data); bytes;) {
    ssize_t n = ::recv(socket, at, bytes, 0);
    if (n <= 0) peer_is_gone();
    at += n, bytes -= size_t(n);
  }
}

void Wire::agree(int socket, int peer, const std::string& verb, const std::string& kind, size_t bytes) {
  Header mine{}, other{};
  std::strncpy(mine.kind, kind.c_str(), sizeof mine.kind - 1);
  mine.bytes = bytes;
  write(socket, &mine, sizeof mine);
  read(socket, &other, sizeof other);
  if (!std::strcmp(mine.kind, other.kind) && bytes == other.bytes) return;
  std::string what = "mismatch: rank " + std::to_string(rank) + " " + verb + " " + std::to_string(bytes) + " bytes (" + kind + ") " +
                     (verb == "sends" ? "to" : "from") + " rank " + std::to_string(peer) + ", which comes with " +
                     std::to_string(other.bytes) + " bytes (" + other.kind + ")";
  report(Counters::get().mismatches, what);
  throw Fault(what);
}

void Wire::send(int peer, const std::string& kind, const void* memory, size_t bytes) {
  if (aborted_) throw Fault("communicator aborted");
  int socket = to_[size_t(peer)];
  agree(socket, peer, "sends", kind, bytes);
  write(socket, memory, bytes);
  bytes_sent += long(bytes);
}

void Wire::receive(int peer, const std::string& kind, void* memory, size_t bytes) {
  if (aborted_) throw Fault("communicator aborted");
  int socket = from_[size_t(peer)];
  agree(socket, peer, "receives", kind, bytes);
  read(socket, memory, bytes);
}

void Wire::abort() {
  if (aborted_.exchange(true)) return;
  for (auto* sockets : {&to_, &from_})
    for (int socket : *sockets)
      if (socket >= 0) ::shutdown(socket, SHUT_RDWR);
}

}  // namespace async_device
