// Moving bytes where the host's processor does it. Other devices get their own file beside this one.
#pragma once

#include <cstring>

namespace photinus::host {

inline void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace photinus::host
