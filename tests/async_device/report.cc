#include "report.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "settings.h"

namespace async_device {
namespace {
std::mutex mutex;
auto* said = new std::string;
}  // namespace

void report(std::atomic<long>& kind, const std::string& what) {
  ++kind;
  std::lock_guard<std::mutex> lock(mutex);
  *said += what + "\n";
  std::fprintf(stderr, "async_device: %s\n", what.c_str());
  std::fflush(stderr);
  if (Settings::get().abort_on_report) std::abort();
}

std::string reports() {
  std::lock_guard<std::mutex> lock(mutex);
  return *said;
}

std::string this_thread() {
  char name[32] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return "thread " + std::to_string(syscall(SYS_gettid)) + " (" + name + ")";
}

// What faulthandler prints. It asks for no lock of the interpreter's, so it may be called from anywhere.
std::string python_stack() {
  static auto* dump = reinterpret_cast<void (*)(int, void*)>(dlsym(RTLD_DEFAULT, "_Py_DumpTraceback"));
  static auto* state = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState"));
  void* thread = dump && state ? state() : nullptr;
  int file = thread ? memfd_create("stack", MFD_CLOEXEC) : -1;
  if (file < 0) return "";
  dump(file, thread);
  std::string text(size_t(lseek(file, 0, SEEK_END)), '\0');
  if (pread(file, &text[0], text.size(), 0) < 0) text.clear();
  ::close(file);
  return text;
}

}  // namespace async_device
