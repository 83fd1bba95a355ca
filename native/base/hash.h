// A hash of texts that is the same on every host.
#pragma once

#include <cstdint>
#include <string_view>

namespace photinus {

// FNV-1a of 64 bits, never 0.
inline uint64_t fnv1a(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash ? hash : 1;
}

}  // namespace photinus
