#include "net/connections.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/file_descriptor.h"
#include "base/log.h"
#include "base/process.h"

namespace photinus {
namespace {

constexpr size_t kLeastPending = 64, kSpareDescriptors = 64;

// Where few descriptors are allowed, fewer strangers may be in their handshake at a time.
Incoming::Limits affordable(const Connections::Options& options) {
  Incoming::Limits limits = options.incoming;
  if (options.listen.empty()) return limits;
  try {
    need_descriptors(limits.pending + kSpareDescriptors, "listening for other hosts");
  } catch (const Error&) {
    limits.pending = std::min<size_t>(limits.pending, kLeastPending);
    need_descriptors(limits.pending + kSpareDescriptors, "listening for other hosts");
  }
  return limits;
}

}  // namespace

std::shared_ptr<Link> Opening::link() const {
  if (!is_over_.load(std::memory_order_acquire)) return nullptr;
  if (link_) return link_;
  throw Error(error_kind_, error_text_);
}

Connections::Connections(const Options& options)
    : options_(options),
      owner_(own_pid()),
      incoming_(
          events_, affordable(options), options.dialect,
          [this](const Claim& claim, const Challenge& said) { return decide(claim, said); },
          [this](PrivateDescriptor socket, const Claim& claim) { take(std::move(socket), claim); },
          [this](const Claim& claim) { drop(claim); }) {
  if (options.streams < 1 || options.streams > 16)
    throw Error(ErrorKind::invalid_argument,
                text("%u streams for data were asked for; a link has 1 to 16", options.streams));
  for (const SocketAddress& address : options.listen)
    addresses_.push_back(incoming_.listen(address, options.tcp, next_id_++));
}

// A forked child has no thread that could release the locks, and its sockets are closed already.
Connections::~Connections() {
  if (owner_ != own_pid()) return;
  std::lock_guard polling(poll_mutex_);
  std::lock_guard lock(mutex_);
  for (auto& [name, group] : groups_)
    for (auto& [peer, opening] : group.openings)
      if (opening->is_under_way()) fail(*opening, ErrorKind::aborted, "the connections were closed");
}

// --- what is asked for

void Connections::reserve(size_t links) const {
  need_descriptors(links * (size_t{options_.streams} + 1),
                   text("a process with %zu links of %u connections each", links, options_.streams + 1u));
}

void Connections::join(const Membership& member) {
  for (const std::string* name : {&member.job, &member.group})
    if (name->empty() || name->size() >= kNameBytes)
      throw Error(ErrorKind::invalid_argument,
                  text("'%s' was given as the name of a job or a group; it may have 1 to %zu bytes",
                       name->c_str(), kNameBytes - 1));
  std::lock_guard lock(mutex_);
  Group group;
  group.own = member;
  if (group.own.pid == 0) group.own.pid = own_pid();
  if (group.own.host.empty()) group.own.host = host_name();
  if (!groups_.emplace(GroupName{member.job, member.group}, std::move(group)).second)
    throw Error(ErrorKind::invalid_argument, "this process has joined " + member.of_group() + " already");
}

void Connections::leave(const std::string& job, const std::string& group) {
  std::lock_guard lock(mutex_);
  const auto found = groups_.find({job, group});
  if (found == groups_.end()) return;
  for (auto& [peer, opening] : found->second.openings)
    if (opening->is_under_way())
      fail(*opening, ErrorKind::aborted,
           found->second.own.who() + " has left " + found->second.own.of_group());
  groups_.erase(found);
}

Connections::Group& Connections::group_of(const std::string& job, const std::string& group) {
  const auto found = groups_.find({job, group});
  if (found == groups_.end())
    throw Error(ErrorKind::invalid_argument, "this process has not joined group " + group + " of job " + job);
  return found->second;
}

// Under mutex_.
std::shared_ptr<Opening> Connections::open(const std::string& job, const std::string& group, uint32_t peer,
                                           const Deadline& deadline, Link::Handler handler) {
  Group& here = group_of(job, group);
  if (peer >= here.own.ranks || peer == here.own.rank)
    throw Error(ErrorKind::invalid_argument, text("a link with rank %u was asked for by rank %u of %u", peer,
                                                  here.own.rank, here.own.ranks));
  std::shared_ptr<Opening> opening(new Opening(deadline));
  opening->own_ = here.own;
  opening->peer_ = peer;
  opening->handler_ = std::move(handler);
  opening->sockets_.resize(options_.streams + size_t{1});
  opening->promised_.resize(options_.streams + size_t{1});
  if (!here.openings.emplace(peer, opening).second)
    throw Error(ErrorKind::invalid_argument,
                text("a second link with rank %u of group %s was asked for", peer, group.c_str()));
  opening->until_s_ = now_s() + deadline.left_s();
  if (std::isfinite(opening->until_s_)) {  // what may come at any time needs no work
    under_way_.push_back(opening);
    busy_.store(true);
  }
  return opening;
}

std::shared_ptr<Opening> Connections::dial(const std::string& job, const std::string& group, uint32_t peer,
                                           const std::vector<SocketAddress>& addresses,
                                           const Deadline& deadline, Link::Handler handler) {
  if (addresses.empty())
    throw Error(ErrorKind::invalid_argument, text("no address of rank %u was given", peer));
  std::lock_guard lock(mutex_);
  auto opening = open(job, group, peer, deadline, std::move(handler));
  opening->is_dialled_ = true;
  Dialing::Order& order = opening->order_;
  order = {addresses,
           opening->own_,
           peer,
           options_.streams,
           {},
           options_.tcp,
           options_.dialect,
           options_.incoming.handshake_s,
           options_.stranger_s,
           options_.gone_s};
  fill_random(order.token.data(), order.token.size());
  for (uint8_t stream = 0; stream <= options_.streams; ++stream) {
    const uint64_t id = next_id_++;
    opening->dials_.push_back(std::make_unique<Dialing>(order, stream, id));
    dials_.emplace(id, opening->dials_.back().get());
  }
  events_.ring();
  return opening;
}

std::shared_ptr<Opening> Connections::await(const std::string& job, const std::string& group, uint32_t peer,
                                            const Deadline& deadline, Link::Handler handler) {
  std::lock_guard lock(mutex_);
  auto opening = open(job, group, peer, deadline, std::move(handler));
  events_.ring();
  return opening;
}

// --- those who dial here (under mutex_)

Incoming::Decision Connections::decide(const Claim& claim, const Challenge& said) {
  const Claimed claimed = read(claim);
  const auto found = groups_.find({claimed.from.job, claimed.from.group});
  Group* const group = found == groups_.end() ? nullptr : &found->second;
  const Membership* const own = group ? &group->own : nullptr;
  Incoming::Decision decision{judge(claim, said, own, options_.streams, options_.dialect), own};
  Judgement& judgement = decision.judgement;
  if (judgement.answer != Answer::accepted) return decision;
  const auto known = group->openings.find(claimed.from.rank);
  Opening* const opening = known == group->openings.end() ? nullptr : known->second.get();
  if (!opening) {
    judgement.answer = Answer::not_yet;
    judgement.reason = own->who() + text(" does not expect rank %u yet", claimed.from.rank);
    return decision;
  }
  const bool is_known = opening->link_ || std::find(opening->promised_.begin(), opening->promised_.end(),
                                                    true) != opening->promised_.end();
  const bool is_same = claimed.from.pid == opening->other_.pid && claimed.from.host == opening->other_.host;
  judgement.answer = Answer::refused;
  if (opening->is_dialled_) {
    judgement.reason = own->who() + text(" dials rank %u itself", claimed.from.rank);
  } else if (opening->link_ || (is_known && !is_same)) {
    judgement.reason = text("a second one says that it is rank %u: ", claimed.from.rank) +
                       claimed.from.who() + ", and there is a link with " + opening->other_.who();
  } else if (!opening->is_under_way()) {
    judgement.reason = "the link was given up: " + opening->error_text_;
  } else {
    if (claimed.token != opening->token_) {  // the first, or it has begun anew
      opening->token_ = claimed.token;
      opening->promised_.assign(opening->promised_.size(), false);
      for (PrivateDescriptor& socket : opening->sockets_) socket.reset();
    }
    opening->other_ = claimed.from;
    opening->promised_[claimed.stream] = true;
    judgement.answer = Answer::accepted;
  }
  return decision;
}

// The opening that a claim was accepted for.
Opening* Connections::opening_of(const Claimed& claimed) {
  const auto group = groups_.find({claimed.from.job, claimed.from.group});
  if (group == groups_.end()) return nullptr;
  const auto found = group->second.openings.find(claimed.from.rank);
  if (found == group->second.openings.end()) return nullptr;
  Opening* const opening = found->second.get();
  return opening->is_under_way() && opening->token_ == claimed.token ? opening : nullptr;
}

void Connections::take(PrivateDescriptor socket, const Claim& claim) {
  const Claimed claimed = read(claim);
  Opening* const opening = opening_of(claimed);
  if (!opening) return;
  opening->sockets_[claimed.stream] = std::move(socket);
  complete(*opening);
}

void Connections::drop(const Claim& claim) {
  const Claimed claimed = read(claim);
  if (Opening* const opening = opening_of(claimed)) opening->promised_[claimed.stream] = false;
}

// --- openings (under mutex_)

// Makes the link once all its connections are there.
void Connections::complete(Opening& opening) {
  for (const PrivateDescriptor& socket : opening.sockets_)
    if (!socket.valid()) return;
  std::vector<std::unique_ptr<Stream>> streams;
  for (PrivateDescriptor& socket : opening.sockets_) {
    auto stream = std::make_unique<TcpStream>(std::move(socket));
    const uint64_t id = next_id_++;
    streams_.emplace(id, stream->readiness());
    events_.watch_as(stream->number(), id);
    streams.push_back(std::move(stream));
  }
  opening.link_ = std::make_shared<Link>(std::move(streams), opening.own_.who(), opening.other_.who(),
                                         std::move(opening.handler_));
  auto links = std::make_shared<Links>();
  for (const auto& link : *links_)
    if (!link.expired()) links->push_back(link);
  links->push_back(opening.link_);
  links_ = std::move(links);
  std::erase_if(streams_, [](const auto& entry) { return entry.second.expired(); });
  for (const auto& dial : opening.dials_) dials_.erase(dial->id());
  opening.dials_.clear();
  opening.is_over_.store(true, std::memory_order_release);
}

void Connections::fail(Opening& opening, ErrorKind kind, const std::string& what) {
  opening.error_kind_ = kind;
  opening.error_text_ = what;
  for (const auto& dial : opening.dials_) dials_.erase(dial->id());
  opening.dials_.clear();
  opening.sockets_.clear();
  opening.is_over_.store(true, std::memory_order_release);
}

void Connections::work_on(Opening& opening, double now) {
  const std::string whom = text("rank %u of ", opening.peer_) + opening.own_.of_group();
  std::string why;
  for (size_t i = 0; i < opening.dials_.size(); ++i) {
    if (opening.sockets_[i].valid()) continue;
    Dialing& dial = *opening.dials_[i];
    const Dialing::State state = dial.work(events_, now);
    if (state == Dialing::State::failed)
      return fail(opening, dial.has_peer_gone() ? ErrorKind::peer_lost : ErrorKind::invalid_argument,
                  opening.own_.who() + " cannot make a link with " + whom + ": " + dial.why() +
                      (dial.has_peer_gone() ? "; it has ended, or another machine has its address" : ""));
    if (state == Dialing::State::done) {
      opening.other_ = dial.peer();
      opening.sockets_[i] = dial.take_socket();
    } else {
      why = dial.why();
    }
  }
  if (opening.is_dialled_) complete(opening);
  if (opening.is_under_way() && !why.empty() && !opening.has_said_why_ &&
      opening.deadline_.elapsed_s() > options_.say_why_s) {
    opening.has_said_why_ = true;
    say(text("%s has no link with %s yet: %s; it goes on trying for %.0f s", opening.own_.who().c_str(),
             whom.c_str(), why.c_str(), opening.deadline_.left_s()));
  }
  if (!opening.is_under_way() || !opening.deadline_.passed()) return;
  if (!opening.is_dialled_) {
    why = "it has not come";
    if (!addresses_.empty()) why += " to " + addresses_.front().text();
  }
  fail(opening, ErrorKind::timeout,
       text("%s has no link with %s after %.1f s: %s", opening.own_.who().c_str(), whom.c_str(),
            opening.deadline_.elapsed_s(), why.empty() ? "its address does not answer" : why.c_str()));
}

void Connections::work(double now) {
  incoming_.work(next_id_, now);
  double due = incoming_.due_s();
  auto note_due = [&](double time_s) { due = due > 0 ? std::min(due, time_s) : time_s; };
  std::erase_if(under_way_, [&](const std::weak_ptr<Opening>& entry) {
    const std::shared_ptr<Opening> opening = entry.lock();
    if (!opening || !opening->is_under_way()) return true;
    work_on(*opening, now);
    if (!opening->is_under_way()) return true;
    note_due(opening->until_s_);
    for (size_t i = 0; i < opening->dials_.size(); ++i)
      if (!opening->sockets_[i].valid()) note_due(opening->dials_[i]->due_s());
    return false;
  });
  busy_.store(due > 0);
  events_.wake_at(due);
}

// --- polling

bool Connections::poll(double limit_s) {
  if (owner_ != own_pid()) return false;
  std::unique_lock polling(poll_mutex_, std::try_to_lock);
  if (!polling) return false;
  // Before a sleep a look at the links is enough: what is ready ends the sleep.
  Moved moved = Moved::nothing;
  if (limit_s > 0) {
    moved = poll_links();
    if (moved != Moved::nothing)
      limit_s = 0;
    else
      rest_links();
  }
  epoll_event room[64];
  const auto events = events_.collect(room, limit_s);
  const bool busy = busy_.load(std::memory_order_relaxed);
  if (!events.empty() || busy) dispatch(events);
  moved = std::max(moved, poll_links());
  return moved == Moved::completed || (!events.empty() && (busy || busy_.load(std::memory_order_relaxed)));
}

// Tells everybody what has changed, and does what the changes allow.
void Connections::dispatch(std::span<const epoll_event> events) {
  std::vector<std::string> lines;
  {
    std::lock_guard lock(mutex_);
    for (const epoll_event& event : events) {
      const uint64_t id = event.data.u64;
      if (const auto stream = streams_.find(id); stream != streams_.end()) {
        if (const auto readiness = stream->second.lock())
          readiness->set(event.events & EPOLLIN, event.events & EPOLLOUT,
                         event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR));
      } else if (const auto dial = dials_.find(id); dial != dials_.end()) {
        dial->second->note();
      } else if (incoming_.has(id)) {
        incoming_.note_pending(id);
      } else {
        incoming_.note_listener(id);
      }
    }
    work(now_s());
    lines = incoming_.complaints().take();
    lines.insert(lines.end(), lines_.begin(), lines_.end());
    lines_.clear();
  }
  for (const std::string& line : lines) say(line);
}

bool Connections::have_data_under_way() {
  const std::shared_ptr<const Links> all = links();
  return std::any_of(all->begin(), all->end(), [](const std::weak_ptr<Link>& entry) {
    const std::shared_ptr<Link> link = entry.lock();
    return link && link->has_data_under_way();
  });
}

std::shared_ptr<const Connections::Links> Connections::links() {
  std::lock_guard lock(mutex_);
  return links_;
}

Connections::Moved Connections::poll_links() {
  bool moved = false, completed = false;
  for (const auto& entry : *links()) {
    const std::shared_ptr<Link> link = entry.lock();
    if (!link) continue;
    const uint64_t before = link->completions();
    moved |= link->poll();
    completed |= link->completions() != before;
  }
  return completed ? Moved::completed : moved ? Moved::bytes : Moved::nothing;
}

void Connections::rest_links() {
  for (const auto& entry : *links())
    if (const std::shared_ptr<Link> link = entry.lock()) link->rest();
}

}  // namespace photinus
