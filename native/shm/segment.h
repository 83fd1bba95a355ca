// Shared memory without a name: a memfd that peers map through a passed descriptor. Nothing can be left
// behind, and the size of /dev/shm does not matter. In a forked child it is private.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "base/file_descriptor.h"

namespace photinus {

class Segment {
 public:
  // Makes a new segment. Pages are taken when first touched, so `bytes` may be far more than is ever used.
  static std::shared_ptr<Segment> create(const std::string& name, size_t bytes);

  // Maps a segment that a peer made. Within one process all maps of the same segment are one map, so that
  // several communicators cost no address space (and a thread sanitizer sees ranks that are threads).
  static std::shared_ptr<Segment> map(FileDescriptor file, size_t bytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* base() const { return base_; }
  size_t bytes() const { return bytes_; }
  int file() const { return file_.get(); }

 private:
  Segment(FileDescriptor file, size_t bytes);
  static std::shared_ptr<Segment> shared(FileDescriptor file, size_t bytes);
  static void make_all_private();

  FileDescriptor file_;
  size_t bytes_;
  std::byte* base_;
};

}  // namespace photinus
