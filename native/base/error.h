// What can go wrong, and text for it. Every error of the engine is an Error; its kind decides which Python
// class it becomes.
#pragma once

#include <stdexcept>
#include <string>

namespace photinus {

enum class ErrorKind {
  peer_lost,         // a peer died, left or failed while it was needed
  timeout,           // a deadline passed
  mismatch,          // ranks called different collectives; the communicator stays usable
  aborted,           // aborted or closed on this rank
  interrupted,       // a signal arrived (Ctrl-C) while the caller's own thread was waiting
  invalid_argument,  // the caller's mistake, found before anything was exchanged
  system,            // the operating system refused something
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// printf into a string.
[[gnu::format(printf, 1, 2)]] std::string text(const char* format, ...);

// Throws Error(system) with what was tried and errno's meaning.
[[noreturn]] void throw_errno(const std::string& what_was_tried);

}  // namespace photinus
