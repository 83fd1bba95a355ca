// The host's processor as a device: it copies at once. Other devices get their own file beside this one.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>

#include "device/device.h"

namespace photinus::host {

inline void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

// For a destination in no cache that nobody reads soon: whole lines go to memory past the caches, so they
// need not be fetched before they are overwritten and push nothing out. Where the destination is in a cache,
// or is read at once, copy is faster. The ranges do not overlap. Other ranks may be told when this has
// returned.
void copy_streaming(void* to, const void* from, size_t bytes);

std::shared_ptr<Device> device();

}  // namespace photinus::host
