#include "net/ucx_worker.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <set>

#include "base/clock.h"
#include "base/error.h"
#include "base/process.h"
#include "net/sha256.h"

namespace photinus {
namespace {

constexpr unsigned kMessage = 1;  // the one kind of UCX's active messages
constexpr size_t kPacketBytes = 32 << 10;
constexpr uint32_t kPackets = 64;  // of a port, at most
constexpr int kTurns = 64;         // of UCX's progress, at a time
constexpr double kClose_s = 1;
enum Kind : uint32_t { kBegin, kData, kTaken };

std::atomic<uint64_t> joined{0};

// While UCX starts a thread of its own, which is to be deaf like the engine's (base/thread.h).
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

// What UCX is given of a message; it reads it until it says that the message is done.
struct UcxPort::Packet {
  UcxWorker* worker = nullptr;
  std::shared_ptr<UcxPort> port;  // while UCX has it
  UcxHeader header;
  std::unique_ptr<std::byte[]> data;
};

UcxPort::~UcxPort() = default;

// The workers of this process. At its exit they stop: its libraries are taken down, whichever threads run.
struct UcxWorker::All {
  std::mutex mutex;  // guards
  std::set<UcxWorker*> workers;
  int owner = own_pid();

  static All& one() {
    static auto* const made = new All;
    return *made;
  }
  All() {
    std::atexit([] {
      std::lock_guard lock(one().mutex);
      if (one().owner != own_pid()) return;
      for (UcxWorker* worker : one().workers) {
        std::lock_guard using_it(worker->mutex_);
        worker->is_shut_ = true;
      }
    });
  }
  // A child that was forked while there were workers has not their threads, and UCX does not know it.
  void need_own_process() {
    std::lock_guard lock(mutex);
    if (owner == own_pid()) return;
    if (!workers.empty())
      throw Error(ErrorKind::system,
                  "this process was forked from one that was using UCX, which does not work in the child");
    owner = own_pid();
  }
};

// --- beginning and end

std::shared_ptr<UcxWorker> UcxWorker::open(std::string& why) {
  const ucx::Library* const library = ucx::Library::open(why);
  if (!library) return nullptr;
  std::shared_ptr<UcxWorker> made(new UcxWorker(*library));
  try {
    All::one().need_own_process();
    made->start();
  } catch (const Error& error) {
    why = error.what();
    return nullptr;
  }
  return made;
}

UcxWorker::UcxWorker(const ucx::Library& library) : library_(library), owner_(own_pid()) {}

std::string UcxWorker::text(ucx::Status status) const {
  const std::string said = library_.said();
  return "UCX " + library_.version + " says '" + library_.text(status) + "'" +
         (said.empty() ? "" : " (and before: '" + said + "')");
}

void UcxWorker::start() {
  const SignalsBlocked blocked;
  auto need = [&](ucx::Status status, const char* what) {
    if (status != ucx::Status::ok) throw Error(ErrorKind::system, text(status) + " when " + what);
  };
  ucx::Config* config = nullptr;
  need(library_.config_read(nullptr, nullptr, &config), "its configuration is read");
  // Where memory is shared, the engine shares it itself; UCX would take containers of one machine for that.
  // And nothing here may wait for a connection. What the user sets comes first.
  if (!std::getenv("UCX_TLS")) library_.config_modify(config, "TLS", "^sm,self");
  if (!std::getenv("UCX_TCP_CONN_NB")) library_.config_modify(config, "TCP_CONN_NB", "y");
  ucx::ContextParams context;
  context.fields = ucx::ContextParams::kFeatures;
  context.features = ucx::ContextParams::kWakeup | ucx::ContextParams::kActiveMessages;
  const ucx::Status status = library_.init_version(library_.interface >> 16, library_.interface & 0xffff,
                                                   &context, config, &context_);
  library_.config_release(config);
  need(status, "it starts");
  ucx::WorkerParams params;
  params.fields = ucx::WorkerParams::kThreadMode;
  params.thread_mode = ucx::WorkerParams::kSerialized;
  need(library_.worker_create(context_, &params, &worker_), "it opens its devices");
  ucx::Address* address = nullptr;
  size_t bytes = 0;
  need(library_.worker_get_address(worker_, &address, &bytes), "its address is asked for");
  address_.assign(reinterpret_cast<const char*>(address), bytes);
  library_.worker_release_address(worker_, address);
  need(library_.worker_get_efd(worker_, &number_), "its events are asked for");
  ucx::MessageParams message;
  message.fields = ucx::MessageParams::kId | ucx::MessageParams::kHandler | ucx::MessageParams::kArgument;
  message.id = kMessage;
  message.handler = &UcxWorker::hear;
  message.argument = this;
  need(library_.worker_set_am_recv_handler(worker_, &message), "it is told who hears messages");
  std::lock_guard lock(All::one().mutex);
  All::one().workers.insert(this);
}

// A forked child has neither UCX's threads nor what it holds; and the lock may be taken there for ever.
bool UcxWorker::is_of_parent() const {
  return owner_ != own_pid();
}

UcxWorker::~UcxWorker() {
  if (is_of_parent()) return;
  {
    const std::lock_guard lock(All::one().mutex);
    All::one().workers.erase(this);
  }
  const std::lock_guard lock(mutex_);
  if (is_shut_) return;
  for (const auto& [name, peer] : peers_) close(*peer);
  for (const auto& peer : failed_) close(*peer);
  // What the peers are told of it.
  for (const Deadline deadline = Deadline::in(kClose_s); worker_ && library_.worker_progress(worker_) > 0;)
    if (deadline.passed()) break;
  if (worker_) library_.worker_destroy(worker_);
  if (context_) library_.cleanup(context_);
}

// --- what others do

bool UcxWorker::progress() {
  if (is_of_parent()) return false;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || is_shut_) return false;
  bool moved = false;
  for (int turn = 0; turn < kTurns && library_.worker_progress(worker_) > 0; ++turn) moved = true;
  for (const auto& peer : failed_) close(*peer);  // not within UCX's own call
  failed_.clear();
  return moved;
}

bool UcxWorker::arm() {
  const std::lock_guard lock(mutex_);
  return is_shut_ || library_.worker_arm(worker_) != ucx::Status::busy;
}

ucx::Status UcxWorker::hear(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                            const ucx::ReceiveParams* params) {
  auto* const worker = static_cast<UcxWorker*>(self);
  UcxHeader heard;
  if (header_bytes != sizeof heard || (params->attributes & ucx::ReceiveParams::kRendezvous))
    return ucx::Status::ok;
  std::memcpy(&heard, header, sizeof heard);
  const auto found = worker->ports_.find(heard.key);
  if (found == worker->ports_.end()) return ucx::Status::ok;
  const std::shared_ptr<UcxPort> port = found->second.lock();
  if (!port) return ucx::Status::ok;
  if (heard.kind == kBegin) {
    port->begun.store(true);
  } else if (heard.kind == kData) {
    worker->deliver(*port, heard.position, static_cast<const std::byte*>(data), bytes);
  } else if (heard.kind == kTaken && heard.position > port->taken.load() &&
             heard.position <= port->written.load()) {
    port->taken.store(heard.position);
  }
  port->readiness->set(heard.kind == kData, heard.kind == kTaken, false);
  return ucx::Status::ok;
}

// UCX promises no order among messages of different sizes.
void UcxWorker::deliver(UcxPort& port, uint64_t position, const std::byte* data, size_t bytes) {
  const uint64_t arrived = port.arrived.load(), end = port.consumed.load() + UcxPort::kWindow;
  if (position < arrived || position > end || bytes > end - position) {
    port.damaged.store(true);
    return;
  }
  if (!port.ring) port.ring.reset(new std::byte[UcxPort::kWindow]);
  const size_t at = position % UcxPort::kWindow;
  const size_t first = std::min<size_t>(bytes, UcxPort::kWindow - at);
  std::memcpy(port.ring.get() + at, data, first);
  std::memcpy(port.ring.get(), data + first, bytes - first);
  uint64_t now = position + bytes;
  if (position > arrived) {
    port.ahead[position] = std::max(port.ahead[position], now);
    return;
  }
  while (!port.ahead.empty() && port.ahead.begin()->first <= now) {
    now = std::max(now, port.ahead.begin()->second);
    port.ahead.erase(port.ahead.begin());
  }
  port.arrived.store(now, std::memory_order_release);
}

void UcxWorker::note_fault(UcxPeer& peer, ucx::Status status) {
  peer.fault.store(status);
  for (auto found = peers_.begin(); found != peers_.end(); ++found) {
    if (found->second.get() != &peer) continue;
    failed_.push_back(found->second);
    peers_.erase(found);
    break;
  }
  for (const auto& [key, weak] : ports_)
    if (const auto port = weak.lock(); port && port->peer.get() == &peer)
      port->readiness->set(true, true, false);
}

// UCX goes on with it by itself.
void UcxWorker::close(UcxPeer& peer) {
  ucx::RequestParams force;
  force.fields = ucx::RequestParams::kFlags;
  force.flags = ucx::RequestParams::kForceClose;
  if (!peer.endpoint) return;
  const ucx::StatusPointer closing = library_.ep_close_nbx(peer.endpoint, &force);
  if (ucx::is_request(closing)) library_.request_free(closing);
  peer.endpoint = nullptr;
}

void UcxWorker::remind(const std::shared_ptr<Readiness>& readiness, double at_s) {
  const std::lock_guard lock(reminders_mutex_);
  reminders_.emplace_back(at_s, readiness);
  const double next = next_reminder_s_.load();
  if (next == 0 || at_s < next) next_reminder_s_.store(at_s);
}

double UcxWorker::fire() {
  const double next = next_reminder_s_.load(std::memory_order_relaxed);
  if (next == 0) return std::numeric_limits<double>::infinity();
  const double now = now_s();
  if (now < next) return next - now;
  const std::lock_guard lock(reminders_mutex_);
  double later = 0;
  std::erase_if(reminders_, [&](const auto& reminder) {
    if (reminder.first > now) {
      later = later == 0 ? reminder.first : std::min(later, reminder.first);
      return false;
    }
    if (const auto readiness = reminder.second.lock()) readiness->set(true, false, false);
    return true;
  });
  next_reminder_s_.store(later);
  return later == 0 ? std::numeric_limits<double>::infinity() : std::max(later - now, 0.0);
}

// --- what streams do

uint64_t UcxWorker::ports_joined() {
  return joined.load();
}

std::shared_ptr<UcxPort> UcxWorker::add(const std::shared_ptr<Readiness>& readiness) {
  auto port = std::make_shared<UcxPort>();
  fill_random(&port->key, sizeof port->key);
  port->readiness = readiness;
  const std::lock_guard lock(mutex_);
  ports_[port->key] = port;
  return port;
}

void UcxWorker::note_error(void* peer, ucx::Endpoint*, ucx::Status status) {
  auto* const failed = static_cast<UcxPeer*>(peer);
  failed->worker->note_fault(*failed, status);
}

void UcxWorker::connect(const std::shared_ptr<UcxPort>& port, const std::string& address, uint64_t peer_key) {
  const std::lock_guard lock(mutex_);
  if (is_shut_) throw Error(ErrorKind::aborted, "this process is ending");
  const auto found = peers_.find(address);
  std::shared_ptr<UcxPeer> peer = found == peers_.end() ? nullptr : found->second;
  if (!peer) {
    peer = std::make_shared<UcxPeer>();
    peer->worker = this;
    ucx::EndpointParams params;
    params.fields =
        ucx::EndpointParams::kAddress | ucx::EndpointParams::kErrorMode | ucx::EndpointParams::kErrorHandler;
    params.address = reinterpret_cast<const ucx::Address*>(address.data());
    params.error_mode = ucx::EndpointParams::kPeerErrors;
    params.handler = &UcxWorker::note_error;
    params.argument = peer.get();
    const ucx::Status status = library_.ep_create(worker_, &params, &peer->endpoint);
    if (status != ucx::Status::ok) throw Error(ErrorKind::system, text(status));
    peers_[address] = peer;
  }
  port->peer = peer;
  port->peer_key = peer_key;
  joined.fetch_add(1);
  post(packet_of(port, false), kBegin, 0, 0);
}

UcxWorker::PacketPointer UcxWorker::packet_of(const std::shared_ptr<UcxPort>& port, bool has_data) {
  PacketPointer packet;
  if (has_data && !port->idle.empty()) {
    packet = std::move(port->idle.back());
    port->idle.pop_back();
  } else if (!has_data || port->packets < kPackets) {
    packet = std::make_unique<UcxPort::Packet>();
    packet->worker = this;
    if (has_data) packet->data.reset(new std::byte[kPacketBytes]), ++port->packets;
  }
  if (packet) packet->port = port;
  return packet;
}

void UcxWorker::recycle(PacketPointer packet) {
  const std::shared_ptr<UcxPort> port = std::move(packet->port);
  if (packet->data) port->idle.push_back(std::move(packet));
}

void UcxWorker::post(PacketPointer packet, uint32_t kind, uint64_t position, size_t bytes) {
  UcxPeer& peer = *packet->port->peer;
  if (is_shut_ || !peer.endpoint || peer.fault.load() != ucx::Status::ok) return recycle(std::move(packet));
  packet->header = {packet->port->peer_key, position, kind, 0};
  ucx::RequestParams params;
  params.fields = ucx::RequestParams::kDone | ucx::RequestParams::kUserData | ucx::RequestParams::kFlags;
  params.flags = ucx::RequestParams::kEager;
  params.done = &UcxWorker::note_done;
  params.user_data = packet.get();
  const ucx::StatusPointer request = library_.am_send_nbx(
      peer.endpoint, kMessage, &packet->header, sizeof packet->header, packet->data.get(), bytes, &params);
  follow(std::move(packet), request);
}

// Until what was sent before has left this process.
void UcxWorker::flush(const std::shared_ptr<UcxPort>& port) {
  UcxPeer& peer = *port->peer;
  if (is_shut_ || !peer.endpoint || peer.fault.load() != ucx::Status::ok) return;
  PacketPointer packet = packet_of(port, false);
  ucx::RequestParams params;
  params.fields = ucx::RequestParams::kDone | ucx::RequestParams::kUserData;
  params.done = &UcxWorker::note_done;
  params.user_data = packet.get();
  const ucx::StatusPointer request = library_.ep_flush_nbx(peer.endpoint, &params);
  follow(std::move(packet), request);
}

void UcxWorker::follow(PacketPointer packet, ucx::StatusPointer request) {
  if (ucx::is_request(request)) {
    packet->port->in_flight.fetch_add(1);
    packet.release();  // note_done() takes it again
    return;
  }
  if (ucx::is_error(request)) note_fault(*packet->port->peer, ucx::status_of(request));
  recycle(std::move(packet));
}

// A send that failed is the error handler's to tell.
void UcxWorker::note_done(void* request, ucx::Status, void* done) {
  PacketPointer packet(static_cast<UcxPort::Packet*>(done));
  packet->worker->library_.request_free(request);
  packet->port->in_flight.fetch_sub(1);
  packet->port->readiness->set(false, true, false);
  recycle(std::move(packet));
}

size_t UcxWorker::send(const std::shared_ptr<UcxPort>& port, const iovec* pieces, int count) {
  size_t moved = 0, skip = 0;
  for (int piece = 0; piece < count;) {
    const uint64_t written = port->written.load();
    const uint64_t room = std::min<uint64_t>(UcxPort::kWindow - (written - port->taken.load()), kPacketBytes);
    if (room == 0) break;
    PacketPointer packet;
    {
      const std::lock_guard lock(mutex_);
      packet = packet_of(port, true);
    }
    if (!packet) break;
    size_t bytes = 0;
    for (; piece < count && bytes < room;) {
      const size_t part = std::min<size_t>(pieces[piece].iov_len - skip, room - bytes);
      std::memcpy(packet->data.get() + bytes, static_cast<std::byte*>(pieces[piece].iov_base) + skip, part);
      bytes += part;
      skip += part;
      if (skip == pieces[piece].iov_len) ++piece, skip = 0;
    }
    port->written.store(written + bytes);
    moved += bytes;
    const std::lock_guard lock(mutex_);
    post(std::move(packet), kData, written, bytes);
  }
  return moved;
}

size_t UcxWorker::receive(const std::shared_ptr<UcxPort>& port, const iovec* pieces, int count) {
  uint64_t consumed = port->consumed.load(std::memory_order_relaxed);
  const uint64_t arrived = port->arrived.load(std::memory_order_acquire);
  const uint64_t before = consumed;
  for (int piece = 0; piece < count; ++piece) {
    auto* to = static_cast<std::byte*>(pieces[piece].iov_base);
    for (size_t left = pieces[piece].iov_len; left > 0 && consumed < arrived;) {
      const size_t at = consumed % UcxPort::kWindow;
      const size_t part = std::min<uint64_t>({left, UcxPort::kWindow - at, arrived - consumed});
      std::memcpy(to, port->ring.get() + at, part);
      to += part;
      left -= part;
      consumed += part;
    }
  }
  if (consumed == before) return 0;
  port->consumed.store(consumed, std::memory_order_release);
  if (consumed - port->told >= UcxPort::kWindow / 4) {
    port->told = consumed;
    const std::lock_guard lock(mutex_);
    post(packet_of(port, false), kTaken, consumed, 0);
  }
  return consumed - before;
}

void UcxWorker::remove(const std::shared_ptr<UcxPort>& port, double until_s) {
  if (until_s > 0 && port->peer) {
    {
      const std::lock_guard lock(mutex_);
      flush(port);
    }
    while (port->in_flight.load() > 0 && now_s() < until_s)
      if (!progress()) usleep(20);
  }
  const std::lock_guard lock(mutex_);
  ports_.erase(port->key);
  // What came meanwhile for other ports is for whoever sleeps on the worker's events.
  if (until_s > 0 && !is_shut_) library_.worker_signal(worker_);
}

}  // namespace photinus
