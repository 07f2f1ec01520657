#include "collectives.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "communicator.h"
#include "plugin.h"
#include "reduction.h"
#include "settings.h"

namespace async_device {
namespace {

const size_t kIdSize = 64;

Communicator* of(C_CCLComm comm) { return reinterpret_cast<Communicator*>(comm); }

std::vector<const void*> pointers(const std::vector<std::vector<char>>& all, size_t offset = 0) {
  std::vector<const void*> at;
  for (auto& one : all) at.push_back(one.data() + offset);
  return at;
}

// Paddle splits what it gathers into a list by a kernel that stands on the communicator's stream on a real device, but
// on the calculation stream where it falls back to the CPU: that stream is made to wait. ASYNC_DEVICE_GATHER=strict: not.
void calculation_waits_for(Stream* stream) {
  if (Settings::get().strict_gather || stream == Stream::calculation(stream->device)) return;
  auto event = std::make_shared<Event>();
  stream->record(event);
  Stream::calculation(stream->device)->wait_for(event);
}

C_Status name(C_CCLComm comm, char* text) {
  std::sprintf(text, "async_device.%d", of(comm)->number);
  return C_SUCCESS;
}
C_Status id_size(size_t* size) { *size = kIdSize; return C_SUCCESS; }
C_Status unique_id(C_CCLRootId* id) {
  static std::atomic<int> made{0};
  if (id->sz < kIdSize || !id->data) id->data = std::malloc(id->sz = kIdSize);
  std::memset(id->data, 0, id->sz);
  std::snprintf(static_cast<char*>(id->data), kIdSize, "async_device.%d.%d", int(::getpid()), made++);
  return C_SUCCESS;
}
C_Status init(size_t size, C_CCLRootId* id, size_t rank, C_CCLComm* comm) {
  return guarded([&] {
    exit_first();
    *comm = reinterpret_cast<C_CCLComm>(new Communicator(static_cast<char*>(id->data), int(size), int(rank)));
  });
}
C_Status destroy(C_CCLComm comm) {  // never deleted: a stream may still come to it
  of(comm)->abort();
  return C_SUCCESS;
}

C_Status group_start() { Communicator::group_start(); return C_SUCCESS; }
C_Status group_end() { return guarded([] { Communicator::group_end(); }); }

C_Status send(void* memory, size_t count, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
  return guarded([&] { of(comm)->transfer(Stream::of(stream), {true, memory, count * bytes_of(type), int(peer)}); });
}
C_Status receive(void* memory, size_t count, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
  return guarded([&] { of(comm)->transfer(Stream::of(stream), {false, memory, count * bytes_of(type), int(peer)}); });
}

C_Status all_reduce(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm, C_Stream stream) {
  return guarded([&] {
    auto* c = of(comm);
    size_t bytes = count * bytes_of(type);
    c->collective(Stream::of(stream), "all_reduce", {{from, bytes, false}, {to, bytes, true}},
                  [=] { reduce(pointers(c->gather("all_reduce", from, bytes)), type, op, count, to); });
  });
}

C_Status broadcast(void* memory, size_t count, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream) {
  return guarded([&] {
    auto* c = of(comm);
    size_t bytes = count * bytes_of(type);
    bool is_root = c->rank == int(root);
    std::vector<Transfer> transfers;
    if (!is_root) transfers.push_back({false, memory, bytes, int(root)});
    for (int peer = 0; is_root && peer < c->size; ++peer)
      if (peer != c->rank) transfers.push_back({true, memory, bytes, peer});
    c->collective(Stream::of(stream), "broadcast", {{memory, bytes, !is_root}}, [=] { c->move("broadcast", transfers); });
  });
}

C_Status reduce_to_root(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, size_t root, C_CCLComm comm, C_Stream stream) {
  return guarded([&] {
    auto* c = of(comm);
    size_t bytes = count * bytes_of(type);
    bool is_root = c->rank == int(root);
    std::vector<Access> accesses{{from, bytes, false}};
    if (is_root) accesses.push_back({to, bytes, true});
    c->collective(Stream::of(stream), "reduce", accesses, [=] {
      auto all = c->gather("reduce", from, bytes);
      if (is_root) reduce(pointers(all), type, op, count, to);
    });
  });
}

C_Status all_gather(void* from, void* to, size_t count, C_DataType type, C_CCLComm comm, C_Stream stream) {
  return guarded([&] {
    auto* c = of(comm);
    size_t bytes = count * bytes_of(type);
    auto* into = static_cast<char*>(to);
    std::vector<Access> accesses{{from, bytes, false}};
    for (int r = 0; r < c->size; ++r) accesses.push_back({into + size_t(r) * bytes, bytes, true});
    c->collective(Stream::of(stream), "all_gather", accesses, [=] {
      auto all = c->gather("all_gather", from, bytes);
      for (size_t r = 0; r < all.size(); ++r) std::memcpy(into + r * bytes, all[r].data(), bytes);
    });
    calculation_waits_for(Stream::of(stream));
  });
}

C_Status reduce_scatter(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm, C_Stream stream) {
  return guarded([&] {
    auto* c = of(comm);
    size_t bytes = count * bytes_of(type);
    c->collective(Stream::of(stream), "reduce_scatter", {{from, bytes * size_t(c->size), false}, {to, bytes, true}}, [=] {
      auto all = c->gather("reduce_scatter", from, bytes * size_t(c->size));
      reduce(pointers(all, size_t(c->rank) * bytes), type, op, count, to);
    });
  });
}

C_Status all_to_all(const void** from, const size_t* from_count, const C_DataType* from_type, void** to, const size_t* to_count,
                    const C_DataType* to_type, size_t, size_t ranks, C_CCLComm comm, C_Stream stream) {
  return guarded([&] {
    auto* c = of(comm);
    std::vector<Transfer> transfers;
    std::vector<Access> accesses;
    for (size_t r = 0; r < ranks; ++r) {
      transfers.push_back({true, const_cast<void*>(from[r]), from_count[r] * bytes_of(from_type[r]), int(r)});
      transfers.push_back({false, to[r], to_count[r] * bytes_of(to_type[r]), int(r)});
    }
    for (auto& transfer : transfers) accesses.push_back({transfer.memory, transfer.bytes, !transfer.is_send});
    c->collective(Stream::of(stream), "all_to_all", accesses, [=] { c->move("all_to_all", transfers); });
    calculation_waits_for(Stream::of(stream));
  });
}

}  // namespace

void set_collectives(C_DeviceInterface* it) {
  it->xccl_get_comm_name = name;
  it->xccl_get_unique_id_size = id_size;
  it->xccl_get_unique_id = unique_id;
  it->xccl_comm_init_rank = init;
  it->xccl_destroy_comm = destroy;
  it->xccl_all_reduce = all_reduce;
  it->xccl_broadcast = broadcast;
  it->xccl_reduce = reduce_to_root;
  it->xccl_all_gather = all_gather;
  it->xccl_reduce_scatter = reduce_scatter;
  it->xccl_all_to_all = all_to_all;
  it->xccl_group_start = group_start;
  it->xccl_group_end = group_end;
  it->xccl_send = send;
  it->xccl_recv = receive;
}

}  // namespace async_device
