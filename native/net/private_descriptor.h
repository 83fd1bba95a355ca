// A file descriptor that a forked child does not keep: a data loader that outlives its rank would hold the
// rank's connections open, and nobody would notice that the rank has gone.
#pragma once

#include <utility>

namespace photinus {

// In a forked child the number stays taken, by /dev/null, until the child's copy of the object is destroyed:
// so that copy closes nothing else. (A child made by clone() itself, without the C library, keeps what it
// has; exec closes all.)
class PrivateDescriptor {
 public:
  PrivateDescriptor() = default;
  PrivateDescriptor(PrivateDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  PrivateDescriptor& operator=(PrivateDescriptor&& other) noexcept {
    if (this != &other) {
      reset();
      number_ = std::exchange(other.number_, -1);
    }
    return *this;
  }
  PrivateDescriptor(const PrivateDescriptor&) = delete;
  PrivateDescriptor& operator=(const PrivateDescriptor&) = delete;
  ~PrivateDescriptor() { reset(); }

  // Opens one in a moment in which this process does not fork: `open` returns a number, or -1 with errno set,
  // in which case this one is invalid. It must open it with CLOEXEC.
  template <class Open>
  static PrivateDescriptor make(Open&& open) {
    PrivateDescriptor made;
    hold_forks();
    made.number_ = open();
    note(made.number_);
    release_forks();
    return made;
  }

  int get() const { return number_; }
  bool valid() const { return number_ >= 0; }
  void reset();

 private:
  static void hold_forks();
  static void release_forks();
  static void note(int number);

  int number_ = -1;
};

}  // namespace photinus
