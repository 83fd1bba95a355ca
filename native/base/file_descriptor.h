// One resource that must be given back: a file descriptor.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <string>
#include <utility>

namespace photinus {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int number) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      reset();
      number_ = std::exchange(other.number_, -1);
    }
    return *this;
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() { reset(); }

  int get() const { return number_; }
  bool valid() const { return number_ >= 0; }
  void reset() {
    if (number_ >= 0) ::close(std::exchange(number_, -1));
  }

 private:
  int number_ = -1;
};

// Sees to it that this process may open so many more files: raises its soft limit where the hard one lets it.
// Throws Error(system) that says for what they are wanted.
void need_descriptors(size_t more, const std::string& purpose);

}  // namespace photinus
