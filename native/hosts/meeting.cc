#include "hosts/meeting.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>

#include "base/clock.h"
#include "base/error.h"
#include "base/interrupt.h"

namespace photinus {
namespace {

constexpr const char* kGroup = "meeting ";
constexpr double kPartingLimit_s = 2;
// Channels of control frames.
constexpr uint32_t kText = 0, kRefusal = 1;

// What has come, on whichever thread polls the links.
struct Texts {
  std::mutex mutex;
  std::vector<std::optional<std::string>> by_rank;
  std::string refusal;  // why rank 0 has given up

  std::string why() {
    std::lock_guard lock(mutex);
    return refusal;
  }
  std::vector<uint32_t> missing() {
    std::lock_guard lock(mutex);
    std::vector<uint32_t> ranks;
    for (uint32_t rank = 0; rank < by_rank.size(); ++rank)
      if (!by_rank[rank]) ranks.push_back(rank);
    return ranks;
  }
};

class Ends {
 public:
  Ends(Network& network, const Meeting& meeting, const std::string& own)
      : network_(network), meeting_(meeting), texts_(std::make_shared<Texts>()) {
    texts_->by_rank.resize(meeting.ranks);
    texts_->by_rank[meeting.rank] = own;
    Membership member;
    member.job = job();
    member.group = kGroup + meeting.address.substr(0, meeting.address.rfind(':'));
    member.attempt = meeting.attempt;
    member.rank = meeting.rank;
    member.ranks = meeting.ranks;
    member.host = meeting.host;
    member.key = key_of(meeting.address, member.job);
    network.connections().join(member);
    group_ = member.group;
  }
  ~Ends() {
    network_.connections().leave(job(), group_);
    for (const auto& link : links_) link->close();
  }

  // From a guest rank 0 takes its own text only, and a guest takes all.
  void open(uint32_t peer) {
    auto handler = [texts = texts_, from_all = meeting_.rank != 0, peer](
                       uint32_t channel, uint64_t rank, const std::byte* text, size_t bytes) {
      std::lock_guard lock(texts->mutex);
      if (channel == kRefusal) {
        if (from_all) texts->refusal.assign(reinterpret_cast<const char*>(text), bytes);
        return;
      }
      if (rank < texts->by_rank.size() && (from_all || rank == peer))
        texts->by_rank[rank].emplace(reinterpret_cast<const char*>(text), bytes);
    };
    Connections& connections = network_.connections();
    // Rank 0 says itself, for all ranks, who has not come.
    const Deadline endless = Deadline::in(std::numeric_limits<double>::infinity());
    openings_.push_back(meeting_.rank == 0
                            ? connections.await(job(), group_, peer, endless, handler)
                            : connections.dial(job(), group_, peer, meeting_.at, deadline_, handler));
  }

  void meet() {
    while (true) {
      for (auto& opening : openings_)
        if (opening)
          if (auto link = opening->link()) {
            if (meeting_.rank != 0) {
              send(*link);
              // Rank 0 may have begun to wait just now, and tells who is missing when its own time is over.
              deadline_ = Deadline::in(meeting_.timeout_s + kPartingLimit_s);
            }
            links_.push_back(std::move(link));
            opening.reset();
          }
      const std::vector<uint32_t> missing = texts_->missing();
      if (missing.empty()) return;
      if (const std::string why = texts_->why(); !why.empty()) throw Error(ErrorKind::timeout, why);
      for (const auto& link : links_) link->check();
      // A guest's dialling has the same deadline, and its error says what was met at rank 0's address.
      const bool dials = meeting_.rank != 0 && openings_.front();
      if (deadline_.passed() && !dials) give_up(missing);
      check_interrupt("the other ranks");
      if (!network_.poll()) usleep(100);
    }
  }
  [[noreturn]] void give_up(const std::vector<uint32_t>& missing) {
    std::string ranks;
    for (size_t i = 0; i < std::min<size_t>(missing.size(), 8); ++i) ranks += text(" %u", missing[i]);
    const std::string why =
        meeting_.rank == 0
            ? text("of %u ranks, %zu have not come to rank 0 in %.1f s:%s%s", meeting_.ranks, missing.size(),
                   deadline_.elapsed_s(), ranks.c_str(), missing.size() > 8 ? " ..." : "")
            : text("rank %u has not heard from rank 0 in %.1f s", meeting_.rank, deadline_.elapsed_s());
    for (const auto& link : links_) {
      if (meeting_.rank != 0) continue;
      link->send_control(kRefusal, 0, why.data(), why.size());
      part(*link);
    }
    throw Error(ErrorKind::timeout, why);
  }
  // One link after the other, so that little is copied at a time.
  void share() {
    for (const auto& link : links_) {
      if (meeting_.rank == 0) send(*link);
      part(*link);
    }
  }
  std::vector<std::string> texts() {
    std::lock_guard lock(texts_->mutex);
    std::vector<std::string> all;
    for (const auto& each : texts_->by_rank) all.push_back(*each);
    return all;
  }

 private:
  void part(Link& link) {
    link.leave();
    const Deadline goodbye = Deadline::in(kPartingLimit_s);
    while (!link.is_finished() && !link.has_failed() && !goodbye.passed())
      if (!network_.poll()) usleep(50);
  }
  std::string job() const { return meeting_.job.empty() ? "job" : meeting_.job.substr(0, 63); }
  void send(Link& link) {
    std::lock_guard lock(texts_->mutex);
    for (uint32_t rank = 0; rank < meeting_.ranks; ++rank)
      if (const auto& each = texts_->by_rank[rank])
        link.send_control(kText, rank, each->data(), each->size());
  }

  Network& network_;
  const Meeting& meeting_;
  Deadline deadline_ = Deadline::in(meeting_.timeout_s);
  const std::shared_ptr<Texts> texts_;
  std::string group_;
  std::vector<std::shared_ptr<Opening>> openings_;
  std::vector<std::shared_ptr<Link>> links_;
};

}  // namespace

std::vector<std::string> exchange_texts(Network& network, const Meeting& meeting, const std::string& own) {
  Ends ends(network, meeting, own);
  if (meeting.rank != 0) ends.open(0);
  if (meeting.rank == 0) network.connections().reserve(meeting.ranks);
  for (uint32_t rank = 1; meeting.rank == 0 && rank < meeting.ranks; ++rank) ends.open(rank);
  ends.meet();
  ends.share();
  return ends.texts();
}

}  // namespace photinus
