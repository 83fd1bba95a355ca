// What the collectives of a group on several hosts, of which one runs at a time, have besides shared memory:
// the meeting of the hosts, level by level, and frames of data over links.
//
// All ranks count how many collectives have ended as mismatches, for all raise in the same one: frames use
// the channel of that number, so what still comes of a collective that was given up is told from what is new.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/host_post.h"
#include "collectives/levels.h"
#include "collectives/net.h"
#include "net/link.h"
#include "peers/peers.h"

namespace photinus {

class HostTraffic {
 public:
  // `rounding`: the levels of calls whose bits depend on the list; links to both lists' counterparts stand.
  HostTraffic(Peers& peers, Levels levels, Levels rounding, const NetSizes& sizes);

  // Those in which hosts meet, whatever their calls.
  const Levels& levels() const { return levels_; }
  // Those over which the data of a call go.
  const Levels& levels_of(const Call& call) const { return is_rounded_in_levels(call) ? rounding_ : levels_; }
  const NetSizes& sizes() const { return sizes_; }
  std::byte* landing() const { return landing_.get(); }

  // A collective begins, with what is known of it on this host. `fault` says, once all hosts were heard, what
  // is wrong; empty: nothing.
  void begin(uint64_t sequence, const Call& call, HostPost post,
             std::function<std::string(const HostPost&)> fault);
  // Tells the counterparts of a level what is known up to now, if that was not done ahead of the plan: with
  // the first frame that is sent to each, in it if it is small, else ahead of it, or when it comes to
  // hearing. A plan over other levels than those of the meeting tells and hears all at its first level.
  void tell(size_t level);
  // Whether all of them have told; what they told is known from then on.
  bool hear(size_t level);
  // Tells and hears in the levels that are left, as far as it goes now, ahead of the plan: while it waits for
  // frames, those who would send them may have given up. Whether that is all.
  bool meet();
  // Who has to come before the next level is heard.
  std::vector<uint32_t> missing() const;
  // Whether the collective must be given up, and, after the last level, why.
  bool is_refused() const { return refused_; }
  const std::string& fault() const { return fault_text_; }

  // Begins the next frame to or from a rank; false while there is no link.
  bool send(uint32_t rank, const std::byte* from, uint64_t bytes);
  bool receive(uint32_t rank, std::byte* to, uint64_t bytes);
  // Whether the first `count` frames have left, or come.
  bool have_left(uint32_t rank, uint64_t count) { return has_moved(sent_[rank], count); }
  bool have_come(uint32_t rank, uint64_t count) { return has_moved(received_[rank], count); }

  // The collective was given up. Afterwards no link touches its memory.
  void forget() { peers_.forget(channel_++); }

 private:
  // What is told: this, the post, and the bytes of a frame.
  struct TellHead {
    uint32_t post_bytes = 0;
    uint32_t frame = 0;  // its number among those of the link and the collective; 0: none
  };
  struct Tell {
    TellHead head;
    std::span<const std::byte> post, frame;
  };
  // The frames in one direction of a link; transfers are used again for the next collective.
  struct Frames {
    std::deque<Transfer> transfers;
    uint64_t begun = 0, moved = 0;
    uint64_t in_tell = 0;  // the number of the one that travelled in a tell; 0: none
  };
  bool hear_level(size_t level);
  void tell_level(size_t level);
  void learn(size_t level);
  bool tell(uint32_t rank, const std::byte* frame, uint64_t bytes, uint32_t stream);
  Tell told_by(uint32_t rank) const;
  void tell_rest();
  static Transfer& next(Frames& frames);
  static bool has_moved(Frames& frames, uint64_t count);

  Peers& peers_;
  const Levels levels_, rounding_;
  const NetSizes sizes_;
  std::vector<std::vector<uint32_t>> counterparts_;  // by level
  std::unique_ptr<std::byte[]> landing_;             // pages are taken when first touched
  uint64_t sequence_ = 0;
  HostPost post_;
  std::function<std::string(const HostPost&)> fault_;
  std::string fault_text_;
  bool refused_ = false;
  bool meets_apart_ = false;      // in other levels than those of the plan
  size_t told_ = 0, heard_ = 0;   // levels
  std::vector<uint32_t> untold_;  // ranks of the level told last
  uint32_t channel_;
  std::vector<Frames> sent_, received_;  // by rank
};

}  // namespace photinus
