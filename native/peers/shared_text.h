// A short text in shared memory that its owner rewrites now and then and others read whole or not at all.
// Every word is atomic, and a version tells torn reads; nobody waits for anybody.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

namespace photinus {

template <size_t kBytes>
class SharedText {
 public:
  // By the owner, one thread at a time. A longer text is cut.
  void write(const std::string& text) {
    char bytes[kBytes] = {};
    std::memcpy(bytes, text.data(), std::min(text.size(), kBytes - 1));
    version_.fetch_add(1, std::memory_order_seq_cst);
    for (size_t i = 0; i < kWords; ++i) {
      uint64_t word;
      std::memcpy(&word, bytes + 8 * i, sizeof word);
      words_[i].store(word, std::memory_order_seq_cst);
    }
    version_.fetch_add(1, std::memory_order_seq_cst);
  }

  // Nothing while it is rewritten.
  std::optional<std::string> try_read() const {
    const uint64_t version = version_.load(std::memory_order_seq_cst);
    char bytes[kBytes];
    for (size_t i = 0; i < kWords; ++i) {
      const uint64_t word = words_[i].load(std::memory_order_seq_cst);
      std::memcpy(bytes + 8 * i, &word, sizeof word);
    }
    if (version % 2 || version_.load(std::memory_order_seq_cst) != version) return std::nullopt;
    return std::string(bytes, strnlen(bytes, kBytes));
  }

  // Tries for a while; empty when the owner died in the middle of writing.
  std::string read() const {
    for (int attempt = 0; attempt < 1000; ++attempt)
      if (auto text = try_read()) return *text;
    return "";
  }

 private:
  static constexpr size_t kWords = kBytes / 8;
  static_assert(kBytes % 8 == 0);

  std::atomic<uint64_t> version_{0};  // odd while it is written
  std::array<std::atomic<uint64_t>, kWords> words_{};
};

}  // namespace photinus
