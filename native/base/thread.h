// Threads of the engine: named, and deaf to signals, so that the interpreter's handlers run on the user's
// threads; and how a thread waits without sleep.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"

namespace photinus {

// Throws Error(system) where the system gives no further thread.
template <class Body>
std::thread start_thread(const char* name, Body&& body) {
  struct AllBlocked {
    sigset_t before;
    AllBlocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~AllBlocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  } masked;
  try {
    std::thread thread(std::forward<Body>(body));
    pthread_setname_np(thread.native_handle(), name);  // at most 15 characters
    return thread;
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::system, std::string("cannot start the thread ") + name + ": " + error.what() +
                                       ". Raise the limit on processes (ulimit -u, pids.max of the control "
                                       "group) or on memory (ulimit -v).");
  }
}

// One turn of spinning.
inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}
// Lets another thread have the core.
inline void yield_cpu() {
  sched_yield();
}

}  // namespace photinus
