// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), for the handshake of links. Written here because the
// engine links nothing but the C++ library: a wheel with a copy of OpenSSL would have to follow its security
// fixes, and one that uses the system's would depend on its version. It hashes some hundred bytes for each
// connection, so the plain form is fast enough.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace photinus {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  Sha256& update(const void* data, size_t bytes);
  Digest finish();  // the object is used up

 private:
  void take_block(const uint8_t* block);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_{};
  uint64_t bytes_ = 0;
};

class HmacSha256 {
 public:
  HmacSha256(const void* key, size_t bytes);
  explicit HmacSha256(const Digest& key) : HmacSha256(key.data(), key.size()) {}
  HmacSha256& update(const void* data, size_t bytes);
  HmacSha256& update(std::string_view text) { return update(text.data(), text.size()); }
  Digest finish();  // the object is used up

 private:
  Sha256 inner_, outer_;
};

// Whether both are equal, in a time that does not tell where they differ.
bool equal_in_constant_time(const void* one, const void* other, size_t bytes);

// Bytes that nobody can foresee, from the kernel. Throws Error(system).
void fill_random(void* data, size_t bytes);

}  // namespace photinus
