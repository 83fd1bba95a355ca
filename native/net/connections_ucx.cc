// Links over UCX: who has it, and the time in which the streams of a link are joined over it.
#include <algorithm>

#include "base/error.h"
#include "net/connections.h"

namespace photinus {

// All under mutex_.

void Connections::open_ucx() {
  has_tried_ucx_ = true;
  std::string why;
  ucx_ = UcxWorker::open(why);
  if (!ucx_) {
    lines_.push_back("UCX is wanted (PHOTINUS_TRANSPORT=ucx) and cannot be used: " + why +
                     "; TCP carries what goes to other hosts");
    busy_.store(true);  // somebody is to say it
    return;
  }
  events_.watch(ucx_->number(), next_id_++);
  polled_ucx_.store(ucx_.get(), std::memory_order_release);
}

bool Connections::agree_on_ucx(const Opening& opening) {
  const Membership &own = opening.own_, &other = opening.other_;
  if (own.ucx == other.ucx) return own.ucx != 0;
  auto name = [](const Membership& member) {
    return member.who() + (member.ucx ? text(" wants UCX %u.%u", member.ucx >> 16, member.ucx & 0xffff)
                                      : " has no UCX, or does not want it (PHOTINUS_TRANSPORT)");
  };
  if (own.ucx && !std::exchange(has_said_who_has_none_, true))
    lines_.push_back(name(own) + ", and " + name(other) +
                     ": TCP carries what goes between processes that differ");
  return false;
}

void Connections::join_over_ucx(Opening& opening) {
  for (PrivateDescriptor& socket : opening.sockets_) {
    auto stream = std::make_unique<UcxStream>(ucx_, std::move(socket));
    const uint64_t id = next_id_++;
    streams_.emplace(id, stream->readiness());
    events_.watch_as(stream->number(), id);
    opening.over_ucx_.push_back(std::move(stream));
  }
  for (const auto& dial : opening.dials_) dials_.erase(dial->id());
  opening.dials_.clear();
  const auto& all = groups_.at({opening.own_.job, opening.own_.group}).openings;
  joining_.push_back(all.at(opening.peer_));
}

void Connections::work_on_ucx() {
  std::erase_if(joining_, [&](const std::weak_ptr<Opening>& entry) {
    const std::shared_ptr<Opening> opening = entry.lock();
    if (!opening || !opening->is_under_way()) return true;
    size_t joined = 0;
    for (const auto& stream : opening->over_ucx_) {
      const UcxStream::State state = stream->join();
      if (state == UcxStream::State::joined) ++joined;
      if (state != UcxStream::State::broken) continue;
      fail(*opening, ErrorKind::system,
           opening->own_.who() + " has no link over UCX with " + opening->other_.who() + ": " +
               stream->fault());
      return true;
    }
    if (joined < opening->over_ucx_.size()) return false;
    std::vector<std::unique_ptr<Stream>> streams;
    for (auto& stream : opening->over_ucx_) streams.push_back(std::move(stream));
    finish(*opening, std::move(streams));
    return true;
  });
}

}  // namespace photinus
