// What travels on a link: a header of fixed size, then so many bytes of payload. Numbers are in the byte
// order of the host; the handshake has seen to it that both ends have the same.
#pragma once

#include <cstddef>
#include <cstdint>

namespace photinus {

enum class FrameKind : uint32_t {
  data = 1,     // goes to the place that was posted for its channel and sequence
  control = 2,  // small, goes to the handler
  goodbye = 3,  // the sender sends nothing more, in order
  fault = 4,    // the sender gives the link up; the payload says why
};

// The largest payload of a frame that is not data: a presence, a reason (SharedText<1024>), a post with the
// little data that travel in it.
inline constexpr size_t kControlBytes = 6144;

struct FrameHeader {
  FrameKind kind = FrameKind::data;
  uint32_t channel = 0;
  uint64_t sequence = 0;
  uint64_t bytes = 0;     // of payload
  uint32_t number = 0;    // of the frame on its stream, from 0 on
  uint32_t checksum = 0;  // CRC-32C of what stands before

  uint32_t expected_checksum() const;
};
static_assert(sizeof(FrameHeader) == 32, "it is sent as it lies in memory");

// CRC-32C (Castagnoli; RFC 3720, B.4), by table.
uint32_t crc32c(const void* data, size_t bytes);

}  // namespace photinus
