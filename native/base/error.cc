#include "base/error.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace photinus {

std::string text(const char* format, ...) {
  va_list args;
  va_start(args, format);
  va_list again;
  va_copy(again, args);
  int length = std::vsnprintf(nullptr, 0, format, args);
  va_end(args);
  std::string out(length > 0 ? static_cast<size_t>(length) : 0, '\0');
  std::vsnprintf(out.data(), out.size() + 1, format, again);
  va_end(again);
  return out;
}

void throw_errno(const std::string& what_was_tried) {
  int number = errno;
  throw Error(ErrorKind::system,
              text("%s: %s (errno %d)", what_was_tried.c_str(), std::strerror(number), number));
}

}  // namespace photinus
