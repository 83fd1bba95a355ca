// Processes as peers see them: handles that cannot be reused by another process, and how one ended.
#pragma once

#include <sys/types.h>

#include <string>

#include "base/file_descriptor.h"

namespace photinus {

// A handle of a living process (Linux 5.3); invalid where the kernel has none.
FileDescriptor open_process(pid_t pid);

// Whether the process behind the handle has ended (it may not have been reaped yet). Waits up to `timeout_s`.
bool has_ended(const FileDescriptor& process, double timeout_s);

// How an ended process ended: "was killed by SIGKILL", "exited with code 3", or "ended (how is not known
// here)". Reads /proc for one that nobody has reaped yet and asks the handle (Linux 6.15) afterwards;
// `patience_s` bounds the wait between the two.
std::string how_it_ended(const FileDescriptor& process, pid_t pid, double patience_s);

// What keeps a living process from running: "it is stopped (SIGSTOP, SIGTSTP or a debugger)", "it waits for a
// disk or a network file system"; empty when nothing is known. The process must be visible here (the same pid
// namespace).
std::string what_holds(pid_t pid);

std::string host_name();

// This process's number without a system call; a forked child sees its own.
pid_t own_pid();

}  // namespace photinus
