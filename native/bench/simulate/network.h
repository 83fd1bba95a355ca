// Cards and switches of a model, and what is under way through them.
#pragma once

#include <algorithm>
#include <vector>

#include "collectives/cost.h"
#include "simulate/events.h"

namespace photinus::simulate {

inline Time time_of(double seconds) {
  return static_cast<Time>(seconds * kPerSecond + 0.5);
}

struct Event {
  // A rank's turn to run; a frame's to leave through a card, to rise to the switches' switch and to fall from
  // it, to enter through a card.
  enum class Kind : uint8_t { run, leave, rise, fall, enter };
  Time at;
  Kind kind;
  bool is_told = false;  // what ranks tell each other, and a small frame that goes along
  uint32_t from = 0, to = 0, link = 0;
  uint64_t bytes = 0;

  uint64_t frame_bytes() const { return is_told ? bytes - kToldBytes : bytes; }
};

class Network {
 public:
  Network(const Model& model, std::vector<uint32_t> host_of_rank, uint32_t hosts);

  // Where a frame that leaves, rises or falls is next, and when.
  Event pass(Event event);
  // When all of a frame that enters has come.
  Time enter(const Event& event);

  uint32_t host_of(uint32_t rank) const { return host_of_rank_[rank]; }
  // Of the host with most.
  uint64_t sent_bytes() const;
  uint64_t received_bytes() const;
  // Of the busiest.
  Time card_out() const { return busiest(out_); }
  Time card_in() const { return busiest(in_); }
  Time switches() const { return std::max(busiest(up_), busiest(down_)); }

 private:
  // What carries one thing at a time. Of a time in which it had nothing to carry it makes up for `burst`.
  struct Pipe {
    Time free = 0, busy = 0;
    uint64_t bytes = 0;  // of frames

    Time take(Time at, Time needs, Time burst = 0) {  // when it is through
      free = std::max(free, at - std::min(at, burst)) + needs;
      busy += needs;
      return std::max(at, free);
    }
  };
  static Time busiest(const std::vector<Pipe>& pipes);
  size_t leaf(uint32_t rank) const;
  Time wire(uint64_t bytes) const;
  Time latency(const Event& event) const;
  Event cross(Event event, Pipe& pipe, Event::Kind next, Time more) const;

  const Model& model_;
  const std::vector<uint32_t> host_of_rank_;
  const Time burst_;
  std::vector<Pipe> out_, in_, up_, down_;
};

}  // namespace photinus::simulate
