// Ranks as processes, for tests that kill and stop them.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "check.h"

namespace photinus::test {

// Runs ranks as processes: `body` returns the text that the rank reports ("" for nothing). `meanwhile` runs
// here, with the processes' numbers by rank.
struct Report {
  int status;
  std::string text;
};
inline std::vector<Report> run_processes(uint32_t world_size,
                                         const std::function<std::string(Communicator&)>& body,
                                         Limits limits = {},
                                         const std::function<void(const std::vector<pid_t>&)>& meanwhile = {},
                                         const std::function<void(Communicator::Options&)>& configure = {}) {
  const std::string address = new_address();
  struct Child {
    pid_t pid;
    int pipe, others;
  };
  // Ports of this host that are free now; each child listens on its own.
  std::vector<HostPlace> places = listeners_of(world_size).places;
  std::vector<Child> children;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    int ends[2], others[2];
    CHECK(pipe(ends) == 0 && pipe(others) == 0);
    pid_t pid = fork();
    if (pid == 0) {
      ::close(ends[0]);
      alarm(60);
      for (HostPlace& place : places)
        CHECK(::read(others[0], &place.pid, sizeof place.pid) == static_cast<ssize_t>(sizeof place.pid));
      std::string text;
      try {
        Communicator::Options options;
        options.rank = rank;
        options.world_size = world_size;
        options.address = address;
        options.limits = limits;
        options.limits.timeout_s = 30;
        options.places = places;
        if (layout()) options.network = std::make_shared<Network>(places[rank].addresses);
        options.progress = std::make_shared<Progress>(std::make_shared<Arena>(size_t{64} << 20));
        if (configure) configure(options);
        own_options() = options;
        auto communicator = Communicator::create(options);
        text = body(*communicator);
      } catch (const std::exception& error) {
        text = std::string("unexpected: ") + error.what();
      }
      CHECK(write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()));
      _exit(0);
    }
    ::close(ends[1]);
    ::close(others[0]);
    children.push_back({pid, ends[0], others[1]});
  }
  for (const Child& each : children) {
    for (const Child& child : children)
      if (layout()) CHECK(write(each.others, &child.pid, sizeof child.pid) > 0);
    ::close(each.others);
  }
  if (meanwhile) {
    std::vector<pid_t> pids;
    for (const Child& child : children) pids.push_back(child.pid);
    meanwhile(pids);
  }
  std::vector<Report> reports(world_size);
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    char buffer[4096];
    ssize_t got;
    while ((got = ::read(children[rank].pipe, buffer, sizeof buffer)) > 0)
      reports[rank].text.append(buffer, static_cast<size_t>(got));
    ::close(children[rank].pipe);
    CHECK(waitpid(children[rank].pid, &reports[rank].status, 0) == children[rank].pid);
  }
  return reports;
}

// How a rank went, as far as its survivors can tell: only another rank of its host sees its process.
inline std::string as_seen(uint32_t victim, uint32_t ranks, const std::string& how) {
  const std::vector<std::string> hosts = hosts_of(ranks);
  return std::count(hosts.begin(), hosts.end(), hosts[victim]) > 1
             ? how
             : "closed its connections without a goodbye: its process was killed, or its host is gone";
}

inline std::string error_text(const std::function<void()>& body) {
  double start = now_s();
  auto [kind, message] = error_of(body);
  return text("kind %d after %.3f: ", static_cast<int>(kind), now_s() - start) + message;
}

}  // namespace photinus::test
