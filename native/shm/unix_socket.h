// Unix sockets with abstract names (nothing in the file system) that carry whole messages and descriptors.
// What waits throws Error(interrupted) when the thread is interrupted.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/file_descriptor.h"

namespace photinus {

// A socket that listens on an abstract name of this network namespace. Throws Error(system) when the name is
// taken.
FileDescriptor listen_on(const std::string& abstract_name);

// Connects, trying again while nobody listens yet; nothing when the deadline passes.
std::optional<FileDescriptor> connect_to(const std::string& abstract_name, const Deadline& deadline);

// The user and process at the other end, as the kernel saw them when the connection was made.
struct Credentials {
  unsigned user;
  int pid;
};
Credentials credentials_of(const FileDescriptor& connection);

// A handle of the process at the other end that cannot be taken over by another (Linux 6.5; earlier by its
// pid).
FileDescriptor process_of(const FileDescriptor& connection);

// Sends one message with descriptors. Returns false when the other end is gone.
bool send_message(const FileDescriptor& connection, const void* data, size_t bytes,
                  const std::vector<int>& files = {});

// Waits until a message or the other end's end has come; false when the deadline passes first.
bool await_message(const FileDescriptor& connection, const Deadline& deadline);

struct Message {
  std::vector<std::byte> data;
  std::vector<FileDescriptor> files;
};
// Receives one message of at most `limit_bytes`; nothing when the other end is gone or the deadline passes
// first. A longer message counts as gone: whoever sent it does not speak this protocol.
std::optional<Message> receive_message(const FileDescriptor& connection, size_t limit_bytes,
                                       const Deadline& deadline);

}  // namespace photinus
