// What happens at which time: a radix heap, for events are never before the last one taken. Events of one
// time come in an order that depends on nothing but the order in which all were added.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace photinus::simulate {

using Time = uint64_t;  // picoseconds since the beginning
inline constexpr double kPerSecond = 1e12;

template <typename Event>  // with a member `at`
class Events {
 public:
  bool empty() const { return count_ == 0; }

  void add(const Event& event) {
    buckets_[static_cast<size_t>(std::bit_width(event.at ^ now_))].push_back(event);
    ++count_;
  }

  Event take() {
    if (next_ == buckets_[0].size()) {
      buckets_[0].clear();
      next_ = 0;
      size_t bucket = 1;
      while (buckets_[bucket].empty()) ++bucket;
      now_ = buckets_[bucket].front().at;
      for (const Event& event : buckets_[bucket])
        if (event.at < now_) now_ = event.at;
      for (const Event& event : buckets_[bucket])
        buckets_[static_cast<size_t>(std::bit_width(event.at ^ now_))].push_back(event);
      buckets_[bucket].clear();
    }
    --count_;
    return buckets_[0][next_++];
  }

 private:
  // By the highest bit in which their time differs from `now_`; the first has those of this very time.
  std::array<std::vector<Event>, 65> buckets_;
  size_t count_ = 0, next_ = 0;
  Time now_ = 0;
};

}  // namespace photinus::simulate
