// An asynchronous accelerator made of host memory and threads, for Paddle's custom device interface (device_ext.h).
// Kernels are Paddle's CPU ones (but kernels.h), by its fallback: it copies their inputs to the host and their outputs back.
#include "plugin.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "collectives.h"
#include "communicator.h"
#include "kernels.h"
#include "memory.h"
#include "report.h"
#include "settings.h"
#include "streams.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace async_device {

void exit_first() { std::atexit(let_exit); }

namespace {

// Before a blocking copy Paddle waits for its calculation stream. That is a part of the copy, and no synchronize of the
// program's: what this thread calls next decides.
thread_local bool has_waited = false;
thread_local Clock waited_for;

}  // namespace

void settle() {
  if (!has_waited) return;
  has_waited = false;
  ++Counters::get().stream_synchronizes;
  Checker::get().host_learns(waited_for);
}

namespace {

const size_t kDevices = 8;  // all alike, so that each rank may have its own
const size_t kDeviceBytes = size_t(4) << 30;

thread_local int current_device = 0;

C_Status ok() { return C_SUCCESS; }
C_Status ok_device(const C_Device) { return C_SUCCESS; }
C_Status set_device(const C_Device device) { current_device = device->id; return C_SUCCESS; }
C_Status get_device(const C_Device device) { device->id = current_device; return C_SUCCESS; }

void settle_as_copy() {
  has_waited = false;
  ++Counters::get().blocking_copies;
}

C_Status status_of(bool is_right) { return is_right ? C_SUCCESS : C_ERROR; }

// Streams

C_Status create_stream(const C_Device device, C_Stream* stream) {
  exit_first();
  *stream = reinterpret_cast<C_Stream>(Stream::make(device->id));
  return C_SUCCESS;
}
C_Status destroy_stream(const C_Device, C_Stream) { return C_SUCCESS; }  // what is queued is still done, as on CUDA
C_Status query_stream(const C_Device device, C_Stream stream) {
  settle();
  return Stream::of(stream, device->id)->is_idle() ? C_SUCCESS : C_FAILED;
}
C_Status synchronize_stream(const C_Device device, C_Stream stream) {
  settle();
  auto* waited = Stream::of(stream, device->id);
  waited_for = Checker::get().now(waited->number);
  has_waited = true;
  return status_of(waited->finish());
}
C_Status synchronize_device(const C_Device device) {
  settle();
  ++Counters::get().device_synchronizes;
  bool is_right = true;
  for (auto* stream : Stream::all(device->id)) is_right &= stream->synchronize();
  return status_of(is_right);
}
C_Status add_callback(const C_Device device, C_Stream stream, C_Callback callback, void* data) {
  settle();
  C_Device_st place = *device;
  Stream::of(stream, device->id)->add("host callback", {}, [=]() mutable {
    C_Status status;
    callback(&place, stream, data, &status);
  });
  return C_SUCCESS;
}

// Events

C_Status create_event(const C_Device, C_Event* event) {
  *event = reinterpret_cast<C_Event>(new std::shared_ptr<Event>(std::make_shared<Event>()));
  return C_SUCCESS;
}
C_Status destroy_event(const C_Device, C_Event event) {
  delete reinterpret_cast<std::shared_ptr<Event>*>(event);
  return C_SUCCESS;
}
C_Status record_event(const C_Device device, C_Stream stream, C_Event event) {
  settle();
  Communicator::record(Stream::of(stream, device->id), Event::of(event));
  return C_SUCCESS;
}
C_Status query_event(const C_Device, C_Event event) {
  settle();
  return Event::of(event)->is_done() ? C_SUCCESS : C_FAILED;
}
C_Status synchronize_event(const C_Device, C_Event event) {
  settle();
  ++Counters::get().event_synchronizes;
  auto [mark, clock] = Event::of(event)->last();
  Event::of(event)->wait(mark);
  Checker::get().host_learns(clock);
  return C_SUCCESS;
}
C_Status stream_wait_event(const C_Device device, C_Stream stream, C_Event event) {
  settle();
  Stream::of(stream, device->id)->wait_for(Event::of(event));
  return C_SUCCESS;
}

// Memory

C_Status allocate(const C_Device device, void** at, size_t bytes) {
  settle();
  *at = Memory::get().allocate(device->id, bytes);
  return *at ? C_SUCCESS : C_FAILED;
}
C_Status release(const C_Device device, void* at, size_t bytes) {
  settle();
  Memory::get().release(device->id, at, bytes);
  return C_SUCCESS;
}
C_Status allocate_host(const C_Device, void** at, size_t bytes) {
  *at = std::malloc(bytes);
  return *at ? C_SUCCESS : C_FAILED;
}
C_Status release_host(const C_Device, void* at, size_t) { std::free(at); return C_SUCCESS; }

std::string sized(const char* what, size_t bytes) { return std::string(what) + " of " + std::to_string(bytes) + " bytes"; }

C_Status copy_within(const C_Device device, C_Stream stream, void* to, const void* from, size_t bytes) {
  settle();
  Stream::of(stream, device->id)->add(sized("copy", bytes), {{from, bytes, false}, {to, bytes, true}}, [=] { std::memmove(to, from, bytes); });
  return C_SUCCESS;
}
// Host memory is pageable, by CUDA's rules: what stands there now is what arrives, later.
C_Status copy_in(const C_Device device, C_Stream stream, void* to, const void* from, size_t bytes) {
  settle();
  auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
  Stream::of(stream, device->id)->add(sized("copy from the host", bytes), {{to, bytes, true}}, [=] { std::memcpy(to, staged->data(), bytes); });
  return C_SUCCESS;
}
// A copy to it is done when the call returns.
bool read_out(Stream* stream, void* to, const void* from, size_t bytes) {
  stream->add(sized("copy to the host", bytes), {{from, bytes, false}}, [=] { std::memcpy(to, from, bytes); });
  return stream->finish();
}
C_Status copy_out(const C_Device device, C_Stream stream, void* to, const void* from, size_t bytes) {
  settle();
  ++Counters::get().blocking_copies;
  return status_of(read_out(Stream::of(stream, device->id), to, from, bytes));
}

// Without a stream: on the calculation stream, which Paddle has waited for.
C_Status blocking_copy_out(const C_Device device, void* to, const void* from, size_t bytes) {
  settle_as_copy();
  return status_of(read_out(Stream::calculation(device->id), to, from, bytes));
}
C_Status blocking_copy_in(const C_Device device, void* to, const void* from, size_t bytes) {
  settle_as_copy();
  copy_in(device, nullptr, to, from, bytes);
  return status_of(Stream::calculation(device->id)->finish());
}
C_Status blocking_copy_within(const C_Device device, void* to, const void* from, size_t bytes) {
  settle_as_copy();
  copy_within(device, nullptr, to, from, bytes);
  return status_of(Stream::calculation(device->id)->finish());
}
C_Status fill(const C_Device device, void* at, unsigned char value, size_t bytes) {
  settle();
  Stream::calculation(device->id)->add(sized("fill", bytes), {{at, bytes, true}}, [=] { std::memset(at, value, bytes); });
  return C_SUCCESS;
}

// What the device is

C_Status count(size_t* number) { *number = kDevices; return C_SUCCESS; }
C_Status list(size_t* numbers) {
  for (size_t i = 0; i < kDevices; ++i) numbers[i] = i;
  return C_SUCCESS;
}
C_Status stats(const C_Device, size_t* total, size_t* left) {
  *total = kDeviceBytes;
  *left = kDeviceBytes - std::min(kDeviceBytes, size_t(Counters::get().allocated_bytes));
  return C_SUCCESS;
}
C_Status chunk(const C_Device, size_t* bytes) { *bytes = 256; return C_SUCCESS; }
C_Status none(const C_Device, size_t* number) { *number = 0; return C_SUCCESS; }

void set_device_part(C_DeviceInterface* it) {
  it->initialize = ok;
  it->finalize = ok;
  it->init_device = ok_device;
  it->deinit_device = ok_device;
  it->set_device = set_device;
  it->get_device = get_device;
  it->synchronize_device = synchronize_device;
  it->get_device_count = count;
  it->get_device_list = list;
  it->device_memory_stats = stats;
  it->device_min_chunk_size = chunk;
  it->device_extra_padding_size = none;
  it->get_compute_capability = none;
  it->get_runtime_version = none;
  it->get_driver_version = none;
}
void set_stream_part(C_DeviceInterface* it) {
  it->create_stream = create_stream;
  it->destroy_stream = destroy_stream;
  it->query_stream = query_stream;
  it->synchronize_stream = synchronize_stream;
  it->stream_add_callback = add_callback;
  it->create_event = create_event;
  it->destroy_event = destroy_event;
  it->record_event = record_event;
  it->query_event = query_event;
  it->synchronize_event = synchronize_event;
  it->stream_wait_event = stream_wait_event;
}
void set_memory_part(C_DeviceInterface* it) {
  it->device_memory_allocate = allocate;
  it->device_memory_deallocate = release;
  it->device_memory_set = fill;
  it->host_memory_allocate = allocate_host;
  it->host_memory_deallocate = release_host;
  it->memory_copy_h2d = blocking_copy_in;
  it->memory_copy_d2h = blocking_copy_out;
  it->memory_copy_d2d = blocking_copy_within;
  it->async_memory_copy_h2d = copy_in;
  it->async_memory_copy_d2h = copy_out;
  it->async_memory_copy_d2d = copy_within;
}

}  // namespace
}  // namespace async_device

EXPORTED void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  static char type[] = "async_device", sub_type[] = "v1";
  params->device_type = type;
  params->sub_device_type = sub_type;
  async_device::set_device_part(params->interface);
  async_device::set_stream_part(params->interface);
  async_device::set_memory_part(params->interface);
  async_device::set_collectives(params->interface);
  async_device::register_kernels();
  async_device::exit_first();
}

// For tests, by ctypes (device.py)

using namespace async_device;

EXPORTED void async_device_group_start() { Communicator::group_start(); }
EXPORTED void async_device_group_end() { Communicator::group_end(); }

// Number of a counter, or -1.
EXPORTED long async_device_counter(const char* name) {
  settle();
  auto& c = Counters::get();
  const std::pair<const char*, std::atomic<long>*> all[] = {
      {"device_synchronizes", &c.device_synchronizes}, {"stream_synchronizes", &c.stream_synchronizes},
      {"event_synchronizes", &c.event_synchronizes},   {"blocking_copies", &c.blocking_copies},
      {"races", &c.races},                             {"freed_in_use", &c.freed_in_use},
      {"mismatches", &c.mismatches},                   {"allocated_bytes", &c.allocated_bytes},
      {"peak_bytes", &c.peak_bytes},                   {"operations", &c.operations}};
  for (auto& one : all)
    if (!std::strcmp(one.first, name)) return *one.second;
  return -1;
}
EXPORTED void async_device_reset_peak() { Counters::get().peak_bytes = long(Counters::get().allocated_bytes); }

EXPORTED int async_device_communicators() { return int(Communicator::all().size()); }
EXPORTED long async_device_bytes_sent(int communicator) { return Communicator::all().at(size_t(communicator))->bytes_sent(); }
// Ends what blocks on a communicator (-1: on all), here; its streams go on, with an error.
EXPORTED void async_device_abort(int communicator) {
  for (auto* one : Communicator::all())
    if (communicator < 0 || one->number == communicator) one->abort();
}
EXPORTED void async_device_clear_errors() { Stream::clear_errors(); }
// The first stream's error on a device, or nothing; valid until the thread's next call.
EXPORTED const char* async_device_error(int device) {
  static thread_local std::string text;
  text.clear();
  for (auto* stream : Stream::all(device))
    if (text.empty()) text = stream->error();
  return text.c_str();
}
EXPORTED const char* async_device_reports() {
  static thread_local std::string text;
  text = reports();
  return text.c_str();
}

// The raw device, so that a test can do with streams what Paddle's functions do not let it.
EXPORTED void* async_device_calculation_stream(int device) { return Stream::calculation(device); }
EXPORTED void* async_device_new_stream(int device) { return Stream::make(device); }
EXPORTED void async_device_copy(void* stream, void* to, const void* from, size_t bytes) {
  C_Device_st device{static_cast<Stream*>(stream)->device};
  copy_within(&device, static_cast<C_Stream>(stream), to, from, bytes);
}
EXPORTED void async_device_stream_wait(void* stream, void* other) {
  settle();
  auto event = std::make_shared<Event>();
  static_cast<Stream*>(other)->record(event);
  static_cast<Stream*>(stream)->wait_for(event);
}
