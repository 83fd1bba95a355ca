// UCX (openucx.org), opened at run time: the few types and functions of its UCP interface that are used here,
// as its public documentation gives them, so that building needs no header of it. Structures say which of
// their fields are set, which is how UCX keeps them valid from version to version; tried with 1.13 and 1.20.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <string>

namespace photinus::ucx {

// What UCX returns: 0 for done, 1 for under way, below 0 an error. One byte.
enum class Status : int8_t { ok = 0, under_way = 1, busy = -15 };
// null: done; an error, in the last bytes of the address space; else a request.
using StatusPointer = void*;
inline bool is_error(StatusPointer pointer) {
  return reinterpret_cast<uintptr_t>(pointer) >= static_cast<uintptr_t>(-100);
}
inline bool is_request(StatusPointer pointer) {
  return pointer && !is_error(pointer);
}
inline Status status_of(StatusPointer pointer) {
  return static_cast<Status>(reinterpret_cast<intptr_t>(pointer));
}

struct Config;
struct Context;
struct Worker;
struct Endpoint;
struct Address;

struct ContextParams {
  static constexpr uint64_t kFeatures = 1 << 0;
  static constexpr uint64_t kWakeup = 1 << 4, kActiveMessages = 1 << 6;  // features
  uint64_t fields = 0, features = 0;
  uint64_t others[16] = {};
};

struct WorkerParams {
  static constexpr uint64_t kThreadMode = 1 << 0;
  static constexpr int kSerialized = 1;  // any thread, one at a time
  uint64_t fields = 0;
  int thread_mode = 0;
  uint64_t others[32] = {};
};

using ErrorHandler = void (*)(void* argument, Endpoint* endpoint, Status status);
struct EndpointParams {
  static constexpr uint64_t kAddress = 1 << 0, kErrorMode = 1 << 1, kErrorHandler = 1 << 2;
  static constexpr int kPeerErrors = 1;  // sends always end, and the handler is told
  uint64_t fields = 0;
  const Address* address = nullptr;
  int error_mode = 0;
  ErrorHandler handler = nullptr;
  void* argument = nullptr;
  uint64_t others[16] = {};
};

struct ReceiveParams {
  static constexpr uint64_t kRendezvous = 1 << 17;  // the data are not there yet
  uint64_t attributes;
};
using MessageHandler = Status (*)(void* argument, const void* header, size_t header_bytes, void* data,
                                  size_t bytes, const ReceiveParams* params);
struct MessageParams {
  static constexpr uint64_t kId = 1 << 0, kHandler = 1 << 2, kArgument = 1 << 3;
  uint64_t fields = 0;
  unsigned id = 0;
  uint32_t flags = 0;
  MessageHandler handler = nullptr;
  void* argument = nullptr;
};

using Done = void (*)(void* request, Status status, void* user_data);
struct RequestParams {
  static constexpr uint32_t kDone = 1 << 1, kUserData = 1 << 2, kFlags = 1 << 4;
  static constexpr uint32_t kEager = 1 << 1;  // flag of a message
  static constexpr uint32_t kForceClose = 1;  // flag of closing an endpoint
  uint32_t fields = 0, flags = 0;
  void* request = nullptr;
  Done done = nullptr;
  uint64_t datatype = 0;
  void* user_data = nullptr;
  uint64_t others[8] = {};
};

// The functions, by the names that they have in UCX.
struct Library {
  // The one of this process, opened by the first call: PHOTINUS_UCX_LIBRARY, else libucp.so.0 where the
  // loader finds it. Null, with the reason in `why`, when there is none, or it lacks something.
  static const Library* open(std::string& why);

  std::string version;       // "1.13.1"
  uint32_t interface = 0;    // major << 16 | minor: processes of the same understand each other
  std::string said() const;  // UCX's last word of warning or error, or nothing
  std::string text(Status status) const { return status_string(status); }

  void (*get_version)(unsigned* major, unsigned* minor, unsigned* release) = nullptr;
  Status (*config_read)(const char* prefix, const char* file, Config** config) = nullptr;
  Status (*config_modify)(Config* config, const char* name, const char* value) = nullptr;
  void (*config_release)(Config* config) = nullptr;
  Status (*init_version)(unsigned major, unsigned minor, const ContextParams* params, const Config* config,
                         Context** context) = nullptr;
  void (*cleanup)(Context* context) = nullptr;
  Status (*worker_create)(Context* context, const WorkerParams* params, Worker** worker) = nullptr;
  void (*worker_destroy)(Worker* worker) = nullptr;
  Status (*worker_get_address)(Worker* worker, Address** address, size_t* bytes) = nullptr;
  void (*worker_release_address)(Worker* worker, Address* address) = nullptr;
  Status (*worker_get_efd)(Worker* worker, int* number) = nullptr;
  Status (*worker_arm)(Worker* worker) = nullptr;
  Status (*worker_signal)(Worker* worker) = nullptr;
  unsigned (*worker_progress)(Worker* worker) = nullptr;
  Status (*worker_set_am_recv_handler)(Worker* worker, const MessageParams* params) = nullptr;
  Status (*ep_create)(Worker* worker, const EndpointParams* params, Endpoint** endpoint) = nullptr;
  StatusPointer (*ep_close_nbx)(Endpoint* endpoint, const RequestParams* params) = nullptr;
  StatusPointer (*ep_flush_nbx)(Endpoint* endpoint, const RequestParams* params) = nullptr;
  StatusPointer (*am_send_nbx)(Endpoint* endpoint, unsigned id, const void* header, size_t header_bytes,
                               const void* data, size_t bytes, const RequestParams* params) = nullptr;
  void (*request_free)(void* request) = nullptr;
  const char* (*status_string)(Status status) = nullptr;
};

}  // namespace photinus::ucx
