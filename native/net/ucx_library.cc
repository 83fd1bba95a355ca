#include "net/ucx_library.h"

#include <dlfcn.h>
#include <signal.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "base/error.h"

namespace photinus::ucx {
namespace {

constexpr uint32_t kLeastInterface = 1 << 16 | 13;
constexpr int kWarning = 2, kStop = 0, kGoOn = 1;  // levels below are worse; what a handler of lines returns

std::mutex said_mutex;
char said_last[512];

// UCX's lines, unless the user asks for them by UCX_LOG_LEVEL: what matters of them becomes part of errors.
int hear_line(const char*, unsigned, const char*, int level, const void*, const char* format,
              va_list values) {
  if (level > kWarning) return kGoOn;
  std::lock_guard lock(said_mutex);
  std::vsnprintf(said_last, sizeof said_last, format, values);
  return std::getenv("UCX_LOG_LEVEL") ? kGoOn : kStop;
}

// Loading UCX takes over the signals of crashes, and SIGHUP; they stay whose they were.
class SignalsKept {
 public:
  SignalsKept() {
    for (int signal = 1; signal < NSIG; ++signal)
      is_known_[signal] = sigaction(signal, nullptr, &before_[signal]) == 0;
  }
  ~SignalsKept() {
    for (int signal = 1; signal < NSIG; ++signal) {
      struct sigaction now{};
      if (!is_known_[signal] || sigaction(signal, nullptr, &now) != 0) continue;
      if (now.sa_handler != before_[signal].sa_handler) sigaction(signal, &before_[signal], nullptr);
    }
  }
  SignalsKept(const SignalsKept&) = delete;
  SignalsKept& operator=(const SignalsKept&) = delete;

 private:
  bool is_known_[NSIG] = {};
  struct sigaction before_[NSIG] = {};
};

std::unique_ptr<Library> load(std::string& why) {
  const char* const named = std::getenv("PHOTINUS_UCX_LIBRARY");
  const char* const file = named && *named ? named : "libucp.so.0";
  void* handle = nullptr;
  {
    const SignalsKept kept;
    handle = dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  }
  if (!handle) {
    const char* const said = dlerror();
    why = said ? said : text("%s cannot be opened", file);
    return nullptr;
  }
  auto made = std::make_unique<Library>();
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    if (!function && why.empty()) why = text("%s has no function %s", file, name);
  };
  find(made->get_version, "ucp_get_version");
  find(made->config_read, "ucp_config_read");
  find(made->config_modify, "ucp_config_modify");
  find(made->config_release, "ucp_config_release");
  find(made->init_version, "ucp_init_version");
  find(made->cleanup, "ucp_cleanup");
  find(made->worker_create, "ucp_worker_create");
  find(made->worker_destroy, "ucp_worker_destroy");
  find(made->worker_get_address, "ucp_worker_get_address");
  find(made->worker_release_address, "ucp_worker_release_address");
  find(made->worker_get_efd, "ucp_worker_get_efd");
  find(made->worker_arm, "ucp_worker_arm");
  find(made->worker_signal, "ucp_worker_signal");
  find(made->worker_progress, "ucp_worker_progress");
  find(made->worker_set_am_recv_handler, "ucp_worker_set_am_recv_handler");
  find(made->ep_create, "ucp_ep_create");
  find(made->ep_close_nbx, "ucp_ep_close_nbx");
  find(made->ep_flush_nbx, "ucp_ep_flush_nbx");
  find(made->am_send_nbx, "ucp_am_send_nbx");
  find(made->request_free, "ucp_request_free");
  find(made->status_string, "ucs_status_string");
  if (!why.empty()) return nullptr;
  unsigned major = 0, minor = 0, release = 0;
  made->get_version(&major, &minor, &release);
  made->version = text("%u.%u.%u", major, minor, release);
  made->interface = major << 16 | minor;
  if (made->interface < kLeastInterface || major > 1) {
    why = text("%s is UCX %s; 1.13 or a later 1.x is needed", file, made->version.c_str());
    return nullptr;
  }
  using LineHandler = decltype(&hear_line);
  if (auto* const push = reinterpret_cast<void (*)(LineHandler)>(dlsym(handle, "ucs_log_push_handler")))
    push(hear_line);
  return made;
}

}  // namespace

std::string Library::said() const {
  std::lock_guard lock(said_mutex);
  return said_last;
}

const Library* Library::open(std::string& why) {
  static std::string reason;
  static const Library* const library = load(reason).release();  // leaked, like UCX itself
  why = reason;
  return library;
}

}  // namespace photinus::ucx
