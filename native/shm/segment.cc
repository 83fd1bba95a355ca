#include "shm/segment.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <utility>

#include "base/error.h"

namespace photinus {
namespace {

constexpr unsigned kNoExecSeal = 8;  // MFD_NOEXEC_SEAL, which the C library's headers may lack

using Key = std::pair<dev_t, ino_t>;
std::mutex maps_mutex;
// Leaked on purpose: segments may be given back while the process ends.
std::map<Key, std::weak_ptr<Segment>>& maps() {
  static auto* all = new std::map<Key, std::weak_ptr<Segment>>;
  return *all;
}

}  // namespace

// A forked child has its own copy of a process's memory, and shared gradients are no exception: what it
// writes to them must not reach its parent. Called with maps_mutex held.
void Segment::make_all_private() {
  for (const auto& [key, map] : maps()) {
    const std::shared_ptr<Segment> segment = map.lock();
    if (!segment) continue;
    // Where even that is refused (vm.overcommit_memory=2), the old map stays.
    void* copy = mmap(nullptr, segment->bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                      segment->file(), 0);
    if (copy != MAP_FAILED)
      mremap(copy, segment->bytes_, segment->bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, segment->base_);
  }
  maps().clear();  // a child that joins a group with its parent maps the parent's memory again, and shared
}

std::shared_ptr<Segment> Segment::create(const std::string& name, size_t bytes) {
  // With vm.memfd_noexec=2 only memory that can never be executed is to be had; kernels before 6.3 know no
  // such.
  FileDescriptor file(memfd_create(name.c_str(), MFD_CLOEXEC | kNoExecSeal));
  if (!file.valid() && errno == EINVAL) file = FileDescriptor(memfd_create(name.c_str(), MFD_CLOEXEC));
  if (!file.valid()) throw_errno("memfd_create for " + name);
  if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0)
    throw_errno(text("giving shared memory %s a size of %zu bytes%s", name.c_str(), bytes,
                     errno == EFBIG ? " (is the size of files limited, ulimit -f?)" : ""));
  return shared(std::move(file), bytes);
}

std::shared_ptr<Segment> Segment::map(FileDescriptor file, size_t bytes) {
  return shared(std::move(file), bytes);
}

std::shared_ptr<Segment> Segment::shared(FileDescriptor file, size_t bytes) {
  struct stat facts{};
  if (fstat(file.get(), &facts) != 0) throw_errno("fstat of a shared memory descriptor");
  if (static_cast<size_t>(facts.st_size) < bytes)
    throw Error(ErrorKind::system, text("a peer's shared memory has %zu bytes where it announced %zu",
                                        static_cast<size_t>(facts.st_size), bytes));
  static const int handles_forks = pthread_atfork([] { maps_mutex.lock(); }, [] { maps_mutex.unlock(); },
                                                  [] {
                                                    make_all_private();
                                                    maps_mutex.unlock();
                                                  });
  if (handles_forks != 0) throw Error(ErrorKind::system, "no memory for a handler of fork");
  std::lock_guard lock(maps_mutex);
  Key key{facts.st_dev, facts.st_ino};
  if (auto known = maps()[key].lock()) return known;
  std::shared_ptr<Segment> segment(new Segment(std::move(file), bytes));
  maps()[key] = segment;
  return segment;
}

Segment::Segment(FileDescriptor file, size_t bytes) : file_(std::move(file)), bytes_(bytes) {
  void* address = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_.get(), 0);
  if (address == MAP_FAILED)
    throw_errno(
        text("mapping %zu bytes of shared memory (is the address space limited, ulimit -v?)", bytes_));
  base_ = static_cast<std::byte*>(address);
}

Segment::~Segment() {
  munmap(base_, bytes_);
}

}  // namespace photinus
