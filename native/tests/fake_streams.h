// Two ends of a made-up connection within one process: bytes arrive in pieces torn anywhere, after random
// delays, and either direction can be cut.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "net/stream.h"

namespace photinus::test {

// One direction.
class FakeWire {
 public:
  explicit FakeWire(uint64_t seed) : random_(seed), capacity_(size_t{1} << (6 + random_() % 15)) {
    const double longest_s[] = {0, 20e-6, 500e-6, 2e-3};
    delay_s_ = longest_s[random_() % std::size(longest_s)];
    torn_ = random_() % 2 == 0;
  }

  Stream::Result write(const iovec* pieces, int count) {
    std::lock_guard lock(mutex_);
    if (broken_ || finished_) return {Stream::Status::broken, 0};
    if (random_() % 8 == 0) return {};
    const size_t moved = each(pieces, count, portion(capacity_ - (bytes_.size() - begin_)),
                              [&](std::byte* at, size_t n) { bytes_.insert(bytes_.end(), at, at + n); });
    if (moved == 0) return {};
    written_ += moved;
    const bool late = random_() % 16 == 0;
    arrivals_.emplace_back(late ? now_s() + delay_s_ * std::uniform_real_distribution()(random_) : 0,
                           written_);
    return {Stream::Status::moved, moved};
  }

  Stream::Result read(const iovec* pieces, int count) {
    std::lock_guard lock(mutex_);
    while (!cut_ && !arrivals_.empty() && arrivals_.front().first <= now_s()) {
      arrived_ = arrivals_.front().second;
      arrivals_.pop_front();
    }
    const size_t there = static_cast<size_t>(arrived_ - read_);
    if (there == 0) {
      if (broken_) return {Stream::Status::broken, 0};
      return {finished_ && !cut_ && read_ == written_ ? Stream::Status::ended : Stream::Status::blocked, 0};
    }
    if (random_() % 8 == 0) return {};
    const size_t moved = each(pieces, count, portion(there), [&](std::byte* at, size_t n) {
      std::memcpy(at, bytes_.data() + begin_, n);
      begin_ += n;
    });
    read_ += moved;
    if (begin_ > capacity_) {
      bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<ptrdiff_t>(begin_));
      begin_ = 0;
    }
    return {Stream::Status::moved, moved};
  }

  void finish() {
    std::lock_guard lock(mutex_);
    finished_ = true;
  }
  // Nothing arrives any more, and nobody is told.
  void cut(bool now = true) {
    std::lock_guard lock(mutex_);
    cut_ = now;
  }
  // Both ends are told, when the receiver has read what had arrived.
  void reset() {
    std::lock_guard lock(mutex_);
    broken_ = true;
  }
  bool is_broken() {
    std::lock_guard lock(mutex_);
    return broken_;
  }

 private:
  size_t portion(size_t most) {
    if (most == 0) return 0;
    if (torn_) return 1 + random_() % std::min<size_t>(most, size_t{1} << (random_() % 17));
    return most;
  }
  template <class Use>
  static size_t each(const iovec* pieces, int count, size_t most, Use&& use) {
    size_t moved = 0;
    for (int i = 0; i < count && moved < most; ++i) {
      const size_t taken = std::min(pieces[i].iov_len, most - moved);
      use(static_cast<std::byte*>(pieces[i].iov_base), taken);
      moved += taken;
    }
    return moved;
  }

  std::mutex mutex_;  // guards what follows
  std::mt19937_64 random_;
  const size_t capacity_;
  double delay_s_;
  bool torn_;
  std::vector<std::byte> bytes_;  // those on their way from begin_ on
  size_t begin_ = 0;
  std::deque<std::pair<double, uint64_t>> arrivals_;  // when bytes up to which number arrive
  uint64_t written_ = 0, arrived_ = 0, read_ = 0;
  bool finished_ = false, cut_ = false, broken_ = false;
};

class FakeStream final : public Stream {
 public:
  FakeStream(std::shared_ptr<FakeWire> in, std::shared_ptr<FakeWire> out)
      : in_(std::move(in)), out_(std::move(out)) {}
  // The end of a process closes both directions.
  ~FakeStream() override { out_->finish(); }

  static std::pair<std::unique_ptr<FakeStream>, std::unique_ptr<FakeStream>> pair(uint64_t seed) {
    auto there = std::make_shared<FakeWire>(2 * seed), back = std::make_shared<FakeWire>(2 * seed + 1);
    return {std::make_unique<FakeStream>(back, there), std::make_unique<FakeStream>(there, back)};
  }

  Result read(const iovec* pieces, int count) override { return in_->read(pieces, count); }
  Result write(const iovec* pieces, int count) override { return out_->write(pieces, count); }
  void set_low_water(size_t bytes) override { low_water_ = bytes; }
  void finish_writing() override { out_->finish(); }
  std::string fault() const override { return "the made-up connection was reset"; }
  StreamCounts counts() const override { return {}; }

  FakeWire& in() { return *in_; }
  FakeWire& out() { return *out_; }
  size_t low_water() const { return low_water_; }

 private:
  const std::shared_ptr<FakeWire> in_, out_;
  size_t low_water_ = 1;
};

}  // namespace photinus::test
