#include "net/incoming.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "base/file_descriptor.h"
#include "base/process.h"

namespace photinus {
namespace {

constexpr int kBacklog = 1024;
constexpr int kAccepts = 64;  // in one turn, so that a flood does not hold up the links
constexpr double kSayAgain_s = 5, kNoDescriptors_s = 0.05;

std::string own_addresses() {
  std::string list;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "not known";
  for (const ifaddrs* entry = all; entry; entry = entry->ifa_next) {
    if (!entry->ifa_addr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const SocketAddress address(entry->ifa_addr,
                                family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    list += (list.empty() ? "" : ", ") + address.host();
  }
  freeifaddrs(all);
  return list;
}

// Sends what is left of a message; false when the connection is over.
template <size_t kBytes>
bool send_rest(int socket, const std::array<uint8_t, kBytes>& message, size_t& sent) {
  while (sent < kBytes) {
    const ssize_t taken = send(socket, message.data() + sent, kBytes - sent, MSG_NOSIGNAL);
    if (taken < 0 && errno == EINTR) continue;
    if (taken < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    sent += static_cast<size_t>(taken);
  }
  return true;
}

// Whether the limit of this process has been raised for them.
bool may_have_more_descriptors() {
  try {
    need_descriptors(kAccepts, "taking connections");
    return true;
  } catch (const Error&) {  // NOLINT: what that leads to is told
    return false;
  }
}

}  // namespace

void Complaints::add(const SocketAddress& from, const std::string& what) {
  const double now = now_s();
  if (said_s_ > 0 && now - said_s_ < kSayAgain_s) {
    ++unsaid_;
    return;
  }
  said_s_ = now;
  const std::string others = unsaid_ ? text(" (and %llu more connections were turned away)",
                                            static_cast<unsigned long long>(unsaid_))
                                     : "";
  unsaid_ = 0;
  lines_.push_back("a connection from " + from.text() + " was turned away: " + what + others);
}

SocketAddress Incoming::listen(const SocketAddress& address, const TcpOptions& tcp, uint64_t id) {
  Listener listener;
  listener.id = id;
  listener.socket = PrivateDescriptor::make(
      [&] { return socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  const int number = listener.socket.get();
  if (number < 0)
    throw_errno("making a socket to listen on " + address.text() +
                " (are there enough file descriptors, ulimit -n? has this host that protocol?)");
  const int one = 1;
  if (address.family() == AF_INET6) setsockopt(number, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
  setsockopt(number, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);  // over connections of a job that is over
  set_options(number, tcp);
  if (bind(number, address.get(), address.bytes()) != 0 || ::listen(number, kBacklog) != 0) {
    if (errno == EADDRINUSE)
      throw Error(ErrorKind::system,
                  text("port %u of %s is taken by another program: give another port, or 0 "
                       "for any that is free",
                       address.port(), address.host().c_str()));
    if (errno == EADDRNOTAVAIL)
      throw Error(ErrorKind::invalid_argument, address.host() + " is no address of this host (" +
                                                   host_name() + "), whose addresses are " + own_addresses());
    throw_errno("listening on " + address.text());
  }
  sockaddr_storage bound{};
  socklen_t bytes = sizeof bound;
  if (getsockname(number, reinterpret_cast<sockaddr*>(&bound), &bytes) != 0)
    throw_errno("asking for the port of " + address.text());
  events_.watch(number, id);
  listeners_.push_back(std::move(listener));
  return SocketAddress(reinterpret_cast<sockaddr*>(&bound), bytes);
}

void Incoming::note_listener(uint64_t id) {
  for (Listener& listener : listeners_)
    if (listener.id == id) listener.may_accept = true;
}

void Incoming::note_pending(uint64_t id) {
  moved_.push_back(id);
}

double Incoming::due_s() const {
  double due = pending_.empty() ? 0 : pending_.begin()->second.until_s;
  for (const Listener& listener : listeners_)
    if (listener.may_accept) due = due > 0 ? std::min(due, listener.retry_s) : listener.retry_s;
  return due;
}

void Incoming::work(uint64_t& next_id, double now) {
  for (Listener& listener : listeners_)
    if (listener.may_accept && now >= listener.retry_s) accept(listener, next_id, now);
  std::vector<uint64_t> moved;
  moved.swap(moved_);
  for (uint64_t id : moved) {
    const auto found = pending_.find(id);
    if (found == pending_.end()) continue;
    const Step step = advance(found->second);
    if (step == Step::over) forget(id, "it closed the connection within the handshake");
    if (step == Step::taken) pending_.erase(id);
  }
  while (!pending_.empty() && pending_.begin()->second.until_s <= now)
    forget(pending_.begin()->first, "it did not finish the handshake in time");
}

void Incoming::accept(Listener& listener, uint64_t& next_id, double now) {
  for (int turn = 0; turn < kAccepts; ++turn) {
    Pending one;
    sockaddr_storage from{};
    socklen_t bytes = sizeof from;
    one.socket = PrivateDescriptor::make([&] {
      return accept4(listener.socket.get(), reinterpret_cast<sockaddr*>(&from), &bytes,
                     SOCK_CLOEXEC | SOCK_NONBLOCK);
    });
    if (!one.socket.valid()) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        listener.may_accept = false;  // until the next event
        return;
      }
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        const int error = errno;
        if (error == EMFILE && may_have_more_descriptors()) continue;
        if (evict()) continue;
        listener.retry_s = now + kNoDescriptors_s;
        complaints_.add({}, text("%s: are there enough file descriptors, ulimit -n?", std::strerror(error)));
        return;
      }
      continue;  // that connection is over already
    }
    one.from = SocketAddress(reinterpret_cast<sockaddr*>(&from), bytes);
    one.until_s = now + limits_.handshake_s;
    one.challenge = make_challenge(dialect_);
    // Who keeps a thousand connections waiting loses the oldest of them; an honest caller needs milliseconds.
    if (pending_.size() >= limits_.pending) evict();
    const uint64_t id = next_id++;
    try {
      events_.watch(one.socket.get(), id);
    } catch (const Error& error) {  // the user's limit of watches
      complaints_.add(one.from, error.what());
      continue;
    }
    pending_.emplace(id, std::move(one));
    moved_.push_back(id);
  }
  listener.retry_s = now;  // more may wait
}

bool Incoming::evict() {
  if (pending_.empty()) return false;
  forget(pending_.begin()->first, "too many connections were in their handshake, and this was the oldest");
  return true;
}

void Incoming::forget(uint64_t id, const char* why) {
  const auto found = pending_.find(id);
  if (found == pending_.end()) return;
  const Pending one = std::move(found->second);
  pending_.erase(found);
  if (one.is_accepted) drop_(one.claim);
  if (!one.is_judged || one.is_accepted) complaints_.add(one.from, why);
}

Incoming::Step Incoming::advance(Pending& one) {
  const int socket = one.socket.get();
  if (!send_rest(socket, one.challenge, one.sent)) return Step::over;
  while (one.heard < one.claim.size()) {
    const ssize_t got = recv(socket, one.claim.data() + one.heard, one.claim.size() - one.heard, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Step::waits;
    if (got <= 0) return Step::over;
    one.heard += static_cast<size_t>(got);
  }
  if (!one.is_judged) decide(one);
  if (!send_rest(socket, one.verdict, one.answered)) return Step::over;
  if (one.answered < one.verdict.size()) return Step::waits;
  if (!one.is_accepted) return Step::over;  // it has been told why
  take_(std::move(one.socket), one.claim);
  return Step::taken;
}

void Incoming::decide(Pending& one) {
  one.is_judged = true;
  const Decision decision = decide_(one.claim, one.challenge);
  one.verdict = make_verdict(decision.judgement, decision.own, one.claim, one.challenge, dialect_);
  one.is_accepted = decision.judgement.answer == Answer::accepted;
  if (decision.judgement.answer != Answer::refused) return;
  const Claimed claimed = read(one.claim);
  std::string who;
  if (claimed.is_photinus && !claimed.from.host.empty())
    who = (decision.judgement.is_member ? "it is " : "it says that it is ") + claimed.from.who() + "; ";
  const std::string here = decision.own ? " (" + decision.own->who() + ")" : "";
  complaints_.add(one.from, who + decision.judgement.reason + here);
}

}  // namespace photinus
