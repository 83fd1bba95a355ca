// What can go wrong, and text for it. Every error of the engine is an Error; its kind decides which Python
// class it becomes.
#pragma once

#include <exception>
#include <string>
#include <utility>

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

// What a thread keeps for others is an Error by value, and each of them throws a copy of its own. An
// exception shared by std::exception_ptr, and the text of a std::runtime_error, are freed by the last of
// them: the counts lie in libstdc++, where ThreadSanitizer, a user's too, does not see them and reports a
// race.
class Error : public std::exception {
 public:
  Error(ErrorKind kind, std::string message) : kind_(kind), message_(std::move(message)) {}
  ErrorKind kind() const { return kind_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  ErrorKind kind_;
  std::string message_;
};

// printf into a string.
[[gnu::format(printf, 1, 2)]] std::string text(const char* format, ...);

// Throws Error(system) with what was tried and errno's meaning.
[[noreturn]] void throw_errno(const std::string& what_was_tried);

}  // namespace photinus
