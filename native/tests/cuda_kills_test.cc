// Ranks that are killed or stopped in the middle of a copy to or from a GPU, as processes over the driver
// that is none. This process itself leaves the driver alone: its threads would not go on in forked children.
#include <algorithm>

#include "base/log.h"
#include "cuda_ranks.h"
#include "processes.h"

using namespace photinus;
using namespace photinus::cuda;
using namespace photinus::test;

namespace {

constexpr uint32_t kRanks = 3, kVictim = 1;
constexpr uint64_t kElems = 3000;  // three chunks of small rings

// Seen by all processes.
struct Shared {
  std::atomic<double> fatal_s{0};
  std::atomic<uint32_t> in_mid_copy{0}, survivors_done{0};
};
Shared& shared() {
  static const std::shared_ptr<std::byte> page = shared_pages(sizeof(Shared));
  static auto* const made = new (page.get()) Shared;
  return *made;
}

// The first copy of each way lasts so long.
std::string slow_copies(int lasts_ms) {
  return text("lasts=cuMemcpyDtoHAsync:1:%d lasts=cuMemcpyHtoDAsync:1:%d", lasts_ms, lasts_ms);
}

std::vector<Report> run_gpu_processes(const std::string& words, Limits limits,
                                      const std::function<std::string(GpuRank&)>& body,
                                      const std::function<void(const std::vector<pid_t>&)>& meanwhile = {}) {
  new (&shared()) Shared;
  return run_processes(
      kRanks,
      [&](Communicator&) {
        fake().configure(words);
        GpuRank seat;
        return body(seat);
      },
      limits, meanwhile,
      [](Communicator::Options& options) {
        options.device_sizes = kSmallRings;
        options.levels.emplace();
      });
}

// A group of some of the ranks.
std::shared_ptr<Communicator> among(const std::vector<uint32_t>& ranks, const std::string& address) {
  Communicator::Options options = own_options();
  std::vector<HostPlace> places;
  for (const uint32_t rank : ranks)
    if (!options.places.empty()) places.push_back(options.places[rank]);
  options.rank = static_cast<uint32_t>(std::find(ranks.begin(), ranks.end(), options.rank) - ranks.begin());
  options.world_size = static_cast<uint32_t>(ranks.size());
  options.places = places;
  options.address = address;
  return Communicator::create(options);
}

// Returns once every rank has a copy under way; whether this is the one whose time has come.
bool is_victim_in_mid_copy(uint32_t rank) {
  for (const Deadline deadline = Deadline::in(20); fake().copies_begun() == 0; usleep(100))
    CHECK(!deadline.passed());
  shared().in_mid_copy += 1;
  for (const Deadline deadline = Deadline::in(20); shared().in_mid_copy < kRanks; usleep(100))
    CHECK(!deadline.passed());
  if (rank == kVictim) shared().fatal_s = now_s();
  return rank == kVictim;
}

// A sum through rings, or an exchange through copies on the host.
std::shared_ptr<Work> begin(Communicator& communicator, const GpuRank& seat, std::byte* at, bool by_rings) {
  if (by_rings) return communicator.submit(seat.all_reduce(at, kElems));
  Submission given;
  given.call = {Operation::all_to_all, Dtype::int32, Reduction::sum, 0, 0};
  for (uint32_t peer = 0; peer < communicator.world_size(); ++peer) {
    given.send_parts.push_back({seat.tensor(ints(kElems, 1)), kElems});
    given.recv_parts.push_back({seat.tensor(Bytes(kElems * 4)), kElems});
  }
  return communicator.submit(seat.on(given));
}

// What a survivor can still do, and what is left in the end.
std::string aftermath(GpuRank& seat, std::shared_ptr<Communicator>& group, std::shared_ptr<Work>& work,
                      const std::string& address) {
  for (const Deadline deadline = Deadline::in(10); !work->has_landed(); usleep(1000))
    CHECK(!deadline.passed());
  work.reset();
  const uint32_t rank = group->rank();
  group.reset();
  std::vector<uint32_t> survivors;
  for (uint32_t other = 0; other < kRanks; ++other)
    if (other != kVictim) survivors.push_back(other);
  CHECK(rank != kVictim);
  {
    const auto rest = among(survivors, address);
    std::byte* const at = seat.tensor(ints(kElems, int(rest->rank())));
    const auto sum = rest->submit(seat.all_reduce(at, kElems));
    sum->wait();
    sum->order(seat.stream);
    CHECK(seat.read(at, kElems * 4) == sum_of_ints(kElems, rest->world_size()));
  }
  seat.device.reset();
  return fake().alive();
}

constexpr const char* kGpu = "GPU 0 (Fake, 0000:01:00.0)";

}  // namespace

TEST_ANY_HOSTS(survivors_of_a_kill_in_mid_copy_name_rank_and_gpu_within_a_second_and_leak_nothing) {
  for (const bool by_rings : {true, false}) {
    const std::string during = new_address(), after = new_address();
    // Longer than a second: whoever first waits for its own copy to end comes too late.
    const auto reports = run_gpu_processes(slow_copies(1300), {}, [&](GpuRank& seat) -> std::string {
      auto group = among({0, 1, 2}, during);
      std::byte* const at = seat.tensor(ints(kElems, int(group->rank())));
      auto work = begin(*group, seat, at, by_rings);
      if (is_victim_in_mid_copy(group->rank())) raise(SIGKILL);
      auto [kind, message] = error_of([&] { work->wait(); });
      const double took_s = now_s() - shared().fatal_s;
      CHECK(kind == ErrorKind::peer_lost);
      CHECK(took_s < 1);
      return message + aftermath(seat, group, work, after);
    });
    CHECK(WTERMSIG(reports[kVictim].status) == SIGKILL);
    for (const uint32_t survivor : {0u, 2u}) {
      const std::string& said = reports[survivor].text;
      CHECK_CONTAINS(said, text("rank %u (pid", kVictim));
      CHECK_CONTAINS(said, as_seen(kVictim, kRanks, "was killed by SIGKILL"));
      if (!layout()) CHECK_CONTAINS(said, text("with tensors on %s, was killed", kGpu));
      CHECK_CONTAINS(said, text("Rank %u of 3 waited 0.", survivor));
      CHECK_CONTAINS(said, by_rings ? "all_reduce #1 of CUDA int32[3000]" : "all_to_all #1");
      CHECK(said.ends_with("checkpoint."));  // nothing is alive in the driver
    }
  }
}

TEST_ANY_HOSTS(the_fault_of_one_ranks_kernel_is_named_by_all_within_a_second_and_the_others_go_on) {
  for (const bool by_rings : {true, false}) {
    const std::string during = new_address(), after = new_address();
    const auto reports = run_gpu_processes("", {}, [&](GpuRank& seat) -> std::string {
      auto group = among({0, 1, 2}, during);
      const bool is_victim = group->rank() == kVictim;
      const double start = now_s();
      std::byte* const at = seat.tensor(ints(kElems, int(group->rank())));
      if (is_victim) fake().launch(seat.stream, 0.05, {}, CUDA_ERROR_ILLEGAL_ADDRESS);
      auto work = begin(*group, seat, at, by_rings);
      auto [kind, message] = error_of([&] { work->wait(); });
      CHECK(now_s() - start < 1);
      CHECK(kind == (is_victim ? ErrorKind::system : ErrorKind::peer_lost));
      return is_victim ? message : message + aftermath(seat, group, work, after);
    });
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      CHECK_CONTAINS(reports[rank].text, text("failed on %s: CUDA_ERROR_ILLEGAL_ADDRESS (700)", kGpu));
      CHECK_CONTAINS(reports[rank].text, text("rank %u (pid", kVictim));
      if (rank != kVictim) CHECK(reports[rank].text.ends_with("checkpoint."));
    }
  }
}

TEST_ANY_HOSTS(a_rank_that_is_stopped_in_mid_copy_has_the_grace_and_what_it_missed_goes_on) {
  for (const bool goes_on : {true, false}) {
    const std::string during = new_address(), after = new_address();
    Limits limits;
    limits.suspect_s = 0.3;
    limits.grace_s = goes_on ? 20 : 0.9;
    const auto reports = run_gpu_processes(
        slow_copies(50), limits,
        [&](GpuRank& seat) -> std::string {
          std::string said;
          set_listener([&](const std::string& line) { said += line; });
          auto group = among({0, 1, 2}, during);
          std::byte* const at = seat.tensor(ints(kElems, int(group->rank())));
          auto work = begin(*group, seat, at, true);
          if (is_victim_in_mid_copy(group->rank())) raise(SIGSTOP);
          if (goes_on) {
            work->wait();
            work->order(seat.stream);
            CHECK(seat.read(at, kElems * 4) == sum_of_ints(kElems, kRanks));
          } else {
            auto [kind, message] = error_of([&] { work->wait(); });
            CHECK(kind == ErrorKind::peer_lost);
            CHECK(now_s() - shared().fatal_s < limits.grace_s + 1.5);
            shared().survivors_done += 1;
            said += message + aftermath(seat, group, work, after);
          }
          set_listener({});
          return said;
        },
        [&](const std::vector<pid_t>& pids) {
          for (const Deadline deadline = Deadline::in(20); shared().fatal_s == 0; usleep(1000))
            CHECK(!deadline.passed());
          if (goes_on) usleep(800000);
          for (const Deadline deadline = Deadline::in(8);
               !goes_on && shared().survivors_done < kRanks - 1 && !deadline.passed();)
            usleep(1000);
          CHECK(kill(pids[kVictim], goes_on ? SIGCONT : SIGKILL) == 0);
        });
    for (const uint32_t survivor : {0u, 2u}) {
      CHECK_CONTAINS(reports[survivor].text, "has shown no sign of life for 0.");
      CHECK_CONTAINS(reports[survivor].text, text("rank %u (pid", kVictim));
      if (!goes_on) CHECK_CONTAINS(reports[survivor].text, "longer than the grace of 0.9 s");
      if (!goes_on) CHECK(reports[survivor].text.ends_with("PHOTINUS_GRACE_S."));
    }
  }
}

TEST_ANY_HOSTS(a_process_that_exits_in_mid_copy_is_named_by_the_others_and_does_not_hang) {
  const std::string during = new_address(), after = new_address();
  const auto reports = run_gpu_processes(slow_copies(300), {}, [&](GpuRank& seat) -> std::string {
    auto group = among({0, 1, 2}, during);
    std::byte* const at = seat.tensor(ints(kElems, int(group->rank())));
    auto work = begin(*group, seat, at, true);
    if (is_victim_in_mid_copy(group->rank())) std::exit(7);
    std::string message;  // none where its threads got it done as it exited
    try {
      work->wait();
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::peer_lost);
      message = error.what();
    }
    CHECK(now_s() - shared().fatal_s < 1);
    return message + aftermath(seat, group, work, after);
  });
  CHECK(WIFEXITED(reports[kVictim].status) && WEXITSTATUS(reports[kVictim].status) == 7);
  for (const uint32_t survivor : {0u, 2u}) {
    CHECK(WIFEXITED(reports[survivor].status) && WEXITSTATUS(reports[survivor].status) == 0);
    const std::string& said = reports[survivor].text;
    CHECK(said.empty() || (said.starts_with(text("rank %u (pid", kVictim)) && said.ends_with("checkpoint.")));
  }
}
