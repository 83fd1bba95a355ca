// A group of many hosts with one rank each, all on this machine and over loopback: what it costs to form it
// and to use it, and what of it each rank holds.
//   many [HOSTS]
// Prints the figures. Exits 1 where a result is wrong, or a rank holds more than is promised. How long things
// take is bounded here by ten times what is promised of a quiet machine.
#include <dirent.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "base/clock.h"
#include "engine/communicator.h"
#include "layouts.h"
#include "resident.h"

using namespace photinus;
using namespace photinus::test;

namespace {

constexpr uint64_t kLarge = (1 << 20) / sizeof(float), kSmall = 4096 / sizeof(float);
constexpr int kSmallCalls = 100;
constexpr double kLongest_s = 30;
constexpr uint64_t kResidentBytes = 16 << 20;
constexpr uint32_t kThreads = 4;  // the caller's, the network's, that of the watch, that of progress

struct Figures {
  double formed_s = 0, large_s = 0, small_s = 0;  // formed: a point in time
  uint64_t resident_bytes = 0;
  uint32_t links = 0, threads = 0;
};

[[noreturn]] void give_up(const std::string& what) {
  std::fprintf(stderr, "many: %s\n", what.c_str());
  _exit(1);
}

uint32_t own_threads() {
  uint32_t found = 0;
  DIR* const folder = opendir("/proc/self/task");
  while (const dirent* entry = readdir(folder)) found += entry->d_name[0] != '.';
  closedir(folder);
  return found;
}

// TCP connections of this process, by the number that a link has of them.
uint32_t own_links() {
  uint32_t found = 0;
  for (int number = 0; number < 4096; ++number) {
    sockaddr_storage peer;
    socklen_t bytes = sizeof peer;
    found +=
        getpeername(number, reinterpret_cast<sockaddr*>(&peer), &bytes) == 0 && peer.ss_family == AF_INET;
  }
  return found / (kLinkStreams + 1);
}

double time_all_reduce(Communicator& group, uint64_t elems, int calls) {
  const double start_s = now_s();
  const auto ranks = static_cast<float>(group.world_size());
  std::vector<float> tensor(elems);
  for (int i = 0; i < calls; ++i) {
    std::fill(tensor.begin(), tensor.end(), static_cast<float>(group.rank() + 1));
    const Call call{Operation::all_reduce, Dtype::float32, Reduction::sum, 0, elems};
    group.submit(call, tensor.data(), tensor.data(), 0, false)->wait();
    for (const float sum : tensor)
      if (sum != ranks * (ranks + 1) / 2) give_up(text("rank %u: a wrong sum", group.rank()));
  }
  return now_s() - start_s;
}

Figures run_rank(Communicator::Options options) {
  Figures figures;
  const auto group = Communicator::create(options);
  group->submit({Operation::barrier, Dtype::uint8, Reduction::sum, 0, 0}, nullptr, nullptr, 0, false)->wait();
  figures.formed_s = now_s();
  figures.large_s = time_all_reduce(*group, kLarge, 1);
  figures.small_s = time_all_reduce(*group, kSmall, kSmallCalls) / kSmallCalls;
  figures.links = own_links();
  figures.threads = own_threads();
  figures.resident_bytes = resident_bytes();
  group->close();
  return figures;
}

}  // namespace

int main(int argc, char** argv) {
  const uint32_t hosts = argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 64;
  if (hosts < 2 || hosts > 1024) {
    std::fprintf(stderr, "usage: many [HOSTS]\n");
    return 2;
  }
  layout() = "apart";
  Communicator::Options options;
  options.world_size = hosts;
  options.address = new_address();
  options.places = listeners_of(hosts).places;  // ports that are free now; each rank listens on its own
  options.limits.timeout_s = 60;
  int pipes[2];
  if (pipe(pipes) != 0) give_up("no pipe");
  std::vector<pid_t> children;
  const double start_s = now_s();
  for (options.rank = 0; options.rank < hosts; ++options.rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(120);
      try {
        options.network = std::make_shared<Network>(options.places[options.rank].addresses);
        const Figures figures = run_rank(options);
        if (write(pipes[1], &figures, sizeof figures) != sizeof figures) give_up("no pipe");
      } catch (const std::exception& error) {
        give_up(text("rank %u: %s", options.rank, error.what()));
      }
      _exit(0);
    }
    children.push_back(pid);
  }
  Figures most;
  for (const pid_t pid : children) {
    int status = 0;
    if (waitpid(pid, &status, 0) != pid || status != 0) give_up("a rank failed");
    Figures one;
    if (read(pipes[0], &one, sizeof one) != sizeof one) give_up("a rank said nothing");
    most.formed_s = std::max(most.formed_s, one.formed_s - start_s);
    most.large_s = std::max(most.large_s, one.large_s);
    most.small_s = std::max(most.small_s, one.small_s);
    most.links = std::max(most.links, one.links);
    most.threads = std::max(most.threads, one.threads);
    most.resident_bytes = std::max(most.resident_bytes, one.resident_bytes);
  }
  std::printf(
      "%u hosts x 1: formed in %.2f s, all_reduce of 1 MiB once %.2f s, of 4 KiB %.2f ms each of %d; at most "
      "%u links, %u threads, %.1f MiB resident a rank\n",
      hosts, most.formed_s, most.large_s, most.small_s * 1e3, kSmallCalls, most.links, most.threads,
      static_cast<double>(most.resident_bytes) / (1 << 20));
  if (most.formed_s > kLongest_s || most.large_s + most.small_s * kSmallCalls > kLongest_s)
    give_up("that took too long");
  if (most.links > 4 + 2 * std::log2(hosts)) give_up("too many links");
  if (most.threads > kThreads) give_up("too many threads");
#if !defined(__SANITIZE_ADDRESS__)  // which has memory of its own
  if (most.resident_bytes > kResidentBytes) give_up("too much memory");
#endif
  return 0;
}
