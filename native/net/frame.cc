#include "net/frame.h"

#include <array>

namespace photinus {
namespace {

constexpr std::array<uint32_t, 256> kTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value & 1 ? value >> 1 ^ 0x82f63b78 : value >> 1;
    table[byte] = value;
  }
  return table;
}();

}  // namespace

uint32_t crc32c(const void* data, size_t bytes) {
  const auto* from = static_cast<const uint8_t*>(data);
  uint32_t value = ~uint32_t{0};
  for (size_t i = 0; i < bytes; ++i) value = kTable[(value ^ from[i]) & 0xff] ^ value >> 8;
  return ~value;
}

uint32_t FrameHeader::expected_checksum() const {
  return crc32c(this, offsetof(FrameHeader, checksum));
}

}  // namespace photinus
