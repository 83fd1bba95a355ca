#include "net/sha256.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace photinus {
namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes (FIPS 180-4, 4.2.2).
constexpr std::array<uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian_at(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]};
}

}  // namespace

void Sha256::take_block(const uint8_t* block) {
  std::array<uint32_t, 64> w;
  for (size_t t = 0; t < 16; ++t) w[t] = big_endian_at(block + 4 * t);
  for (size_t t = 16; t < 64; ++t) {
    const uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = s1 + w[t - 7] + s0 + w[t - 16];
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t t = 0; t < 64; ++t) {
    const uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + kRounds[t] + w[t];
    const uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const std::array<uint32_t, 8> after{a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += after[i];
}

Sha256& Sha256::update(const void* data, size_t bytes) {
  const auto* from = static_cast<const uint8_t*>(data);
  while (bytes > 0) {
    const size_t there = bytes_ % 64, taken = std::min(bytes, 64 - there);
    std::memcpy(block_.data() + there, from, taken);
    bytes_ += taken, from += taken, bytes -= taken;
    if (bytes_ % 64 == 0) take_block(block_.data());
  }
  return *this;
}

Digest Sha256::finish() {
  const uint64_t bits = bytes_ * 8;
  const uint8_t one = 0x80, zeros[64] = {};
  update(&one, 1);
  update(zeros, (64 + 56 - bytes_ % 64) % 64);
  std::array<uint8_t, 8> length;
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
  update(length.data(), length.size());
  Digest digest;
  for (size_t i = 0; i < 32; ++i) digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

HmacSha256::HmacSha256(const void* key, size_t bytes) {
  std::array<uint8_t, 64> padded{};
  if (bytes > padded.size()) {
    const Digest digest = Sha256().update(key, bytes).finish();
    std::memcpy(padded.data(), digest.data(), digest.size());
  } else if (bytes > 0) {
    std::memcpy(padded.data(), key, bytes);
  }
  for (uint8_t& byte : padded) byte ^= 0x36;
  inner_.update(padded.data(), padded.size());
  for (uint8_t& byte : padded) byte ^= 0x36 ^ 0x5c;
  outer_.update(padded.data(), padded.size());
}

HmacSha256& HmacSha256::update(const void* data, size_t bytes) {
  inner_.update(data, bytes);
  return *this;
}

Digest HmacSha256::finish() {
  const Digest inner = inner_.finish();
  return outer_.update(inner.data(), inner.size()).finish();
}

bool equal_in_constant_time(const void* one, const void* other, size_t bytes) {
  const auto *a = static_cast<const volatile uint8_t*>(one), *b = static_cast<const volatile uint8_t*>(other);
  uint32_t difference = 0;
  for (size_t i = 0; i < bytes; ++i) difference |= static_cast<uint32_t>(a[i] ^ b[i]);
  return difference == 0;
}

void fill_random(void* data, size_t bytes) {
  auto* to = static_cast<uint8_t*>(data);
  while (bytes > 0) {
    const ssize_t got = getrandom(to, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) throw_errno("asking the kernel for random bytes");
    to += got, bytes -= static_cast<size_t>(got);
  }
}

}  // namespace photinus
