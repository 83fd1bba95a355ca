#include "shm/segment.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <utility>

#include "base/error.h"

namespace photinus {
namespace {

using Key = std::pair<dev_t, ino_t>;
std::mutex maps_mutex;
// Leaked on purpose: segments may be given back while the process ends.
std::map<Key, std::weak_ptr<Segment>>& maps() {
  static auto* all = new std::map<Key, std::weak_ptr<Segment>>;
  return *all;
}

}  // namespace

std::shared_ptr<Segment> Segment::create(const std::string& name, size_t bytes) {
  FileDescriptor file(memfd_create(name.c_str(), MFD_CLOEXEC));
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
