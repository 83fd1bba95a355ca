// Threads of the engine: named, and deaf to signals, so that the interpreter's handlers run on the user's
// threads.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace photinus {

template <class Body>
std::thread start_thread(const char* name, Body&& body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::forward<Body>(body));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), name);  // at most 15 characters
  return thread;
}

}  // namespace photinus
