// The bytes of streams over UCX: what a process sends and receives there, for all its streams.
//
// Bytes travel as active messages, each sent eagerly and named by the key of the port that it is for: so
// nothing need be posted ahead or cancelled, and UCX's rendezvous, which is slow where processes sleep
// between messages, is not used. UCX itself has no flow control and keeps whatever comes; so a sender has at
// most kWindow bytes on their way that the receiver has not taken, for which the port has room. Keys are
// random numbers that travelled over an authenticated connection, because whoever reaches UCX's port may
// send to it.
//
// Between two processes there is one endpoint, whatever the number of streams, and it is closed with the
// worker only: UCX pairs endpoints by the order of their making, so a process that closed one could break
// another one of its peer's.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "net/stream.h"
#include "net/ucx_library.h"

namespace photinus {

class UcxWorker;

// Another process, as far as UCX is concerned.
struct UcxPeer {
  UcxWorker* worker = nullptr;
  ucx::Endpoint* endpoint = nullptr;  // null once it is closed
  std::atomic<ucx::Status> fault{ucx::Status::ok};
};

// In front of each message.
struct UcxHeader {
  uint64_t key = 0, position = 0;
  uint32_t kind = 0, reserved = 0;
};

// One end of a stream.
struct UcxPort {
  static constexpr uint64_t kWindow = 512 << 10;

  uint64_t key = 0, peer_key = 0;  // in the headers of what comes here, and of what goes from here
  std::shared_ptr<UcxPeer> peer;
  std::shared_ptr<Readiness> readiness;
  std::atomic<bool> begun{false};      // the other end has found this one
  std::atomic<bool> damaged{false};    // what came was no part of the stream
  std::atomic<uint32_t> in_flight{0};  // messages of which UCX still reads the bytes

  // Counts of bytes since the beginning. Received: by the other end's sending, by the one thread that reads.
  std::atomic<uint64_t> arrived{0}, consumed{0};
  uint64_t told = 0;  // of those consumed, by the thread that reads
  // Sent: by the one thread that writes, and by what the other end says.
  std::atomic<uint64_t> written{0}, taken{0};

  // Guarded by the worker.
  std::unique_ptr<std::byte[]> ring;   // of kWindow bytes, once something has come
  std::map<uint64_t, uint64_t> ahead;  // pieces that came before others: from where to where
  struct Packet;
  std::vector<std::unique_ptr<Packet>> idle;
  uint32_t packets = 0;

  ~UcxPort();
};

class UcxWorker {
 public:
  // Null, with the reason, where there is no UCX, or it does not start.
  static std::shared_ptr<UcxWorker> open(std::string& why);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  // All methods may be called from any thread.

  const ucx::Library& library() const { return library_; }
  // How another process finds this one.
  const std::string& address() const { return address_; }
  // Readable when progress() has something to do, if arm() said so after the last one.
  int number() const { return number_; }
  // Does what can be done now. Whether something moved; false too when another thread is at it.
  bool progress();
  bool arm();
  // Sets `readiness` to be read at a point in time; by fire(), which says how long that is from now.
  void remind(const std::shared_ptr<Readiness>& readiness, double at_s);
  double fire();

  // A new port, for a stream of this readiness.
  std::shared_ptr<UcxPort> add(const std::shared_ptr<Readiness>& readiness);
  // Joins it to another process's. Throws Error(system) with what UCX says.
  void connect(const std::shared_ptr<UcxPort>& port, const std::string& address, uint64_t peer_key);
  // Copies bytes in or out; how many.
  size_t send(const std::shared_ptr<UcxPort>& port, const iovec* pieces, int count);
  size_t receive(const std::shared_ptr<UcxPort>& port, const iovec* pieces, int count);
  // Forgets it, once what was sent has left this process, or at that point in time.
  void remove(const std::shared_ptr<UcxPort>& port, double until_s);
  // A fault and what UCX said, for people.
  std::string text(ucx::Status status) const;
  bool is_of_parent() const;

  // Ports that have been joined in this process.
  static uint64_t ports_joined();

 private:
  struct All;
  using PacketPointer = std::unique_ptr<UcxPort::Packet>;
  explicit UcxWorker(const ucx::Library& library);
  void start();
  // What follows runs under mutex_.
  PacketPointer packet_of(const std::shared_ptr<UcxPort>& port, bool has_data);
  void post(PacketPointer packet, uint32_t kind, uint64_t position, size_t bytes);
  void flush(const std::shared_ptr<UcxPort>& port);
  void follow(PacketPointer packet, ucx::StatusPointer request);
  void deliver(UcxPort& port, uint64_t position, const std::byte* data, size_t bytes);
  void note_fault(UcxPeer& peer, ucx::Status status);
  void close(UcxPeer& peer);
  static void recycle(PacketPointer packet);
  static void note_done(void* request, ucx::Status status, void* packet);
  static void note_error(void* peer, ucx::Endpoint* endpoint, ucx::Status status);
  static ucx::Status hear(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                          const ucx::ReceiveParams* params);

  const ucx::Library& library_;
  const int owner_;
  std::string address_;
  int number_ = -1;

  std::mutex mutex_;  // guards UCX, which one thread at a time may use, and
  ucx::Context* context_ = nullptr;
  ucx::Worker* worker_ = nullptr;
  bool is_shut_ = false;  // the process is ending: UCX is not touched any more
  std::unordered_map<uint64_t, std::weak_ptr<UcxPort>> ports_;
  std::map<std::string, std::shared_ptr<UcxPeer>> peers_;  // by address; without those that have failed
  std::vector<std::shared_ptr<UcxPeer>> failed_;

  std::mutex reminders_mutex_;  // guards
  std::vector<std::pair<double, std::weak_ptr<Readiness>>> reminders_;
  std::atomic<double> next_reminder_s_{0};  // 0: none
};

}  // namespace photinus
