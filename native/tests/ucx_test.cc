#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "check.h"
#include "connected.h"
#include "hosts/network.h"
#include "net/ucx_stream.h"

using namespace photinus;
using namespace photinus::test;

namespace {

Connections::Options over_ucx() {
  Connections::Options made = options();
  made.ucx = true;
  return made;
}

bool is_here() {
  std::string why;
  if (ucx::Library::open(why)) return true;
  std::printf("  skipped, there is no UCX: %s\n", why.c_str());
  return false;
}

// The connections that UCX has made: those at none of these addresses.
void shut_down_all_but(const std::vector<SocketAddress>& kept) {
  auto is_kept = [&](int file, auto get_name) {
    sockaddr_storage name{};
    socklen_t bytes = sizeof name;
    if (get_name(file, reinterpret_cast<sockaddr*>(&name), &bytes) != 0) return true;
    if (name.ss_family != AF_INET && name.ss_family != AF_INET6) return true;
    const uint16_t port = SocketAddress(reinterpret_cast<sockaddr*>(&name), bytes).port();
    return std::any_of(kept.begin(), kept.end(), [&](const auto& each) { return each.port() == port; });
  };
  DIR* const all = opendir("/proc/self/fd");
  CHECK(all);
  int count = 0;
  while (const dirent* entry = readdir(all)) {
    const int file = std::atoi(entry->d_name);
    if (!is_kept(file, getpeername) && !is_kept(file, getsockname)) count += shutdown(file, SHUT_RDWR) == 0;
  }
  closedir(all);
  CHECK(count > 0);
}

}  // namespace

// First, since a process looks for the library once.
TEST(without_the_library_one_line_says_so_and_tcp_carries_the_link) {
  const pid_t child = fork();
  if (child == 0) {
    setenv("PHOTINUS_UCX_LIBRARY", "/nowhere/libucp.so.0", 1);
    Lines lines;
    Pair pair(over_ucx());
    exchange(*pair.link_a, *pair.link_b, 1, 100000, [&] { poll_all({&pair.a, &pair.b}); });
    CHECK(UcxWorker::ports_joined() == 0);
    const std::string line =
        "UCX is wanted (PHOTINUS_TRANSPORT=ucx) and cannot be used: /nowhere/libucp.so.0: ";
    CHECK_CONTAINS(lines.text(), line);
    CHECK_CONTAINS(lines.text(), "; TCP carries what goes to other hosts\n");
    CHECK(lines.text().rfind(line) == lines.text().find(line, 1));  // one of each end
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST(what_is_no_transport_is_refused) {
  const char* const set = std::getenv("PHOTINUS_TRANSPORT");
  const std::string before = set ? set : "";
  setenv("PHOTINUS_TRANSPORT", "rdma", 1);
  auto [kind, message] = error_of([] { transport_of_environment(); });
  CHECK(kind == ErrorKind::invalid_argument);
  CHECK_CONTAINS(message, "PHOTINUS_TRANSPORT is 'rdma'; what carries tensors between hosts is tcp or ucx");
  setenv("PHOTINUS_TRANSPORT", before.c_str(), 1);
}

TEST(a_link_over_ucx_carries_frames_both_ways_and_is_left_in_order) {
  if (!is_here()) return;
  const uint64_t before = UcxWorker::ports_joined();
  Connections::Options given = over_ucx();
  given.streams = 2;
  Lines lines;
  Pair pair(given);
  CHECK(UcxWorker::ports_joined() == before + 6);
  for (uint64_t i = 0; i < 12; ++i)
    exchange(i % 2 ? *pair.link_a : *pair.link_b, i % 2 ? *pair.link_b : *pair.link_a, i, i * i * 50000,
             [&] { poll_all({&pair.a, &pair.b}); });
  pair.link_b->send_control(1, 1, "hello", 5);
  run({&pair.a, &pair.b}, [&] { return pair.heard == "hello"; });
  pair.link_a->leave();
  pair.link_b->leave();
  run({&pair.a, &pair.b}, [&] { return pair.link_a->is_finished() && pair.link_b->is_finished(); });
  CHECK(lines.text().empty());
}

TEST(threads_that_sleep_on_their_connections_are_woken_by_ucx) {
  if (!is_here()) return;
  Pair pair(over_ucx());
  std::atomic<bool> over{false};
  auto sleeper = [&](Connections& own) {
    while (!over.load()) own.poll(5);
  };
  std::thread one([&] { sleeper(pair.a); }), other([&] { sleeper(pair.b); });
  const double start = now_s();
  for (uint64_t i = 0; i < 50; ++i)
    exchange(i % 2 ? *pair.link_a : *pair.link_b, i % 2 ? *pair.link_b : *pair.link_a, i, i % 5 * 200000,
             [&] {
               pair.a.ring();
               pair.b.ring();
               usleep(50);
             });
  CHECK(now_s() - start < 4);
  over.store(true);
  pair.a.ring();
  pair.b.ring();
  one.join();
  other.join();
}

TEST(ends_of_which_one_has_no_ucx_use_tcp_and_say_so_once) {
  if (!is_here()) return;
  const uint64_t before = UcxWorker::ports_joined();
  Lines lines;
  Connections a(over_ucx()), b(options());
  a.join(member(0));
  b.join(member(1));
  auto at_a = a.await("job", "world", 1, soon(), kDeaf);
  auto at_b = b.dial("job", "world", 0, a.addresses(), soon(), kDeaf);
  run({&a, &b}, [&] { return at_a->link() && at_b->link() && !lines.text().empty(); });
  exchange(*at_a->link(), *at_b->link(), 1, 100000, [&] { poll_all({&a, &b}); });
  CHECK(UcxWorker::ports_joined() == before);
  CHECK_CONTAINS(lines.text(), "rank 0 (pid ");
  CHECK_CONTAINS(lines.text(), " wants UCX 1.");
  CHECK_CONTAINS(lines.text(),
                 "on host-1) has no UCX, or does not want it (PHOTINUS_TRANSPORT): TCP carries");
  const std::string said = lines.text();
  CHECK(std::count(said.begin(), said.end(), '\n') == 1);
}

TEST(ucx_that_fails_while_its_peer_lives_is_named_with_what_it_said_and_what_to_do) {
  if (!is_here()) return;
  Pair pair(over_ucx());
  exchange(*pair.link_a, *pair.link_b, 1, 1000, [&] { poll_all({&pair.a, &pair.b}); });
  std::vector<SocketAddress> kept = pair.a.addresses();
  kept.insert(kept.end(), pair.b.addresses().begin(), pair.b.addresses().end());
  shut_down_all_but(kept);
  const double start = now_s();
  run({&pair.a}, [&] { return pair.link_a->has_failed(); });  // the other end looks away
  CHECK(now_s() - start < 3);
  auto [kind, message] = error_of([&] { pair.link_a->check(); });
  CHECK(kind == ErrorKind::system);
  CHECK_CONTAINS(message, "the link of rank 0 (pid ");
  CHECK_CONTAINS(message, " on host-1): UCX 1.");
  CHECK_CONTAINS(message, " says '");
  CHECK_CONTAINS(message, "; PHOTINUS_TRANSPORT=tcp does without UCX");
}

TEST(ranks_whose_ucx_fails_say_so_in_their_errors) {
  if (!is_here()) return;
  const std::optional<std::string> before = layout();
  const char* const set = std::getenv("PHOTINUS_TRANSPORT");
  const std::string variable = set ? set : "";
  layout() = "apart";
  setenv("PHOTINUS_TRANSPORT", "ucx", 1);
  std::atomic<int> told{0};
  run_ranks(2, [&](Communicator& communicator) {
    const Call call{Operation::all_reduce, Dtype::float32, Reduction::sum, 0, 1};
    float x = 1;
    communicator.submit(call, &x, &x)->wait();
    CHECK(x == 2);
    std::vector<SocketAddress> kept;
    for (const HostPlace& place : own_options().places)
      kept.insert(kept.end(), place.addresses.begin(), place.addresses.end());
    if (communicator.rank() == 0) usleep(200000), shut_down_all_but(kept);
    auto [kind, message] = error_of([&] {
      for (int i = 0; i < 2; ++i) communicator.submit(call, &x, &x)->wait();
    });
    CHECK(kind == ErrorKind::peer_lost);
    CHECK_CONTAINS(message, text("rank %u (pid ", 1 - communicator.rank()));
    if (message.find("cannot be reached any more: ") != std::string::npos) {
      CHECK_CONTAINS(message, ": UCX 1.");
      CHECK_CONTAINS(message, "; PHOTINUS_TRANSPORT=tcp does without UCX");
      ++told;
    }
  });
  CHECK(told > 0);  // one may learn of it by the other one's giving up
  setenv("PHOTINUS_TRANSPORT", variable.c_str(), 1);
  layout() = before;
}
