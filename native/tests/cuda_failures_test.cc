// What goes wrong with a driver's call or a GPU in the middle of operations, over the driver that is none.
#include <latch>
#include <mutex>

#include "base/log.h"
#include "cuda_ranks.h"

using namespace photinus;
using namespace photinus::cuda;
using namespace photinus::test;

namespace {

constexpr uint64_t kElems = 3000;  // three chunks of small rings

struct Begun {
  std::vector<std::shared_ptr<Work>> works;
  std::vector<std::pair<std::byte*, Bytes>> expected;
};

// Everyone sends to the next rank.
void begin_messages(Communicator& communicator, const GpuRank& seat, Begun& begun) {
  const uint32_t me = communicator.rank(), ranks = communicator.world_size(), left = (me + ranks - 1) % ranks;
  MessageCall out, in;
  out.dtype = in.dtype = Dtype::int32;
  out.elems = in.elems = kElems;
  out.device = in.device = seat.device;
  out.stream = in.stream = seat.stream;
  out.timeout_s = in.timeout_s = 20;
  in.operation = Operation::recv;
  out.peer = (me + 1) % ranks;
  in.peer = left;
  out.buffer = seat.tensor(ints(kElems, int(me)));
  std::byte* const to = seat.tensor(Bytes(kElems * 4));
  in.buffer = to;
  begun.expected.push_back({to, ints(kElems, int(left))});
  for (const MessageCall& message : {out, in}) begun.works.push_back(communicator.submit(message));
}

// `by_parts`: all_gather of tensors of different sizes.
struct Tried {
  Operation operation;
  bool by_parts = takes_parts(operation);
};

void begin(const Tried& tried, bool asynchronous, Communicator& communicator, const GpuRank& seat,
           Begun& begun) {
  const Operation operation = tried.operation;
  if (operation == Operation::send) return begin_messages(communicator, seat, begun);
  const uint32_t me = communicator.rank(), ranks = communicator.world_size(), root = ranks - 1;
  Submission given;
  given.call = {operation, Dtype::int32, Reduction::sum, root, kElems};
  given.timeout_s = 20;
  given.asynchronous = asynchronous;
  if (operation == Operation::barrier) {
    given.call.elems = 0;
  } else if (tried.by_parts) {
    given.call.elems = 0;
    const bool gathers = operation == Operation::all_gather;
    auto content = [&](uint32_t from, uint32_t to) {
      const bool goes = operation == Operation::gather    ? to == root
                        : operation == Operation::scatter ? from == root
                                                          : true;
      return ints(goes ? kElems + from * 7 + (gathers ? 0 : to) : 0, int(from * 100 + (gathers ? 0 : to)));
    };
    std::byte* const whole = gathers ? seat.tensor(content(me, me)) : nullptr;  // the same to everybody
    for (uint32_t peer = 0; peer < ranks; ++peer) {
      const Bytes out = content(me, peer), in = content(peer, me);
      std::byte* const to = seat.tensor(Bytes(in.size()));
      given.send_parts.push_back({gathers ? whole : seat.tensor(out), out.size() / 4});
      given.recv_parts.push_back({to, in.size() / 4});
      begun.expected.push_back({to, in});
    }
  } else {
    std::vector<Bytes> inputs;
    for (uint32_t rank = 0; rank < ranks; ++rank)
      inputs.push_back(ints(operation == Operation::reduce_scatter ? kElems * ranks : kElems, int(rank)));
    const Bytes result =
        naive(given.call, inputs, std::vector<double>(ranks, 1), levels_of(hosts_of(ranks)))[me];
    const bool in_place = operation != Operation::all_gather && operation != Operation::reduce_scatter;
    std::byte* const send = seat.tensor(inputs[me]);
    std::byte* const recv = in_place ? send : seat.tensor(Bytes(result.size()));
    given.send = send;
    given.recv = recv;
    if (operation != Operation::reduce || me == root) begun.expected.push_back({recv, result});
  }
  begun.works.push_back(communicator.submit(seat.on(given)));
}

// One operation over a driver that behaves as `words` say. Its errors, and what was said; where a rank had no
// error its result is right.
class Trial {
 public:
  Trial(const Tried& tried, uint32_t ranks, const std::string& words, bool asynchronous) {
    set_listener([this](const std::string& line) { note(said, line); });
    fake().configure(words);
    {
      std::vector<std::unique_ptr<GpuRank>> seats;
      for (uint32_t rank = 0; rank < ranks; ++rank) seats.push_back(std::make_unique<GpuRank>());
      before = fake().calls();
      std::latch all_have_met(ranks);
      auto body = [&](Communicator& communicator) {
        all_have_met.arrive_and_wait();
        run(tried, asynchronous, communicator, *seats[communicator.rank()]);
      };
      run_ranks(ranks, body, 60, {}, {}, [](Communicator::Options& options) {
        options.device_sizes = kSmallRings;
        options.levels.emplace();
      });
      during = fake().calls();
    }
    after = fake().calls();
    CHECK(fake().alive().empty());
    set_listener({});
  }

  bool told_of(const std::string& call) const {
    return std::any_of(said.begin(), said.end(), [&](const std::string& line) {
      return line.find(call + " failed on GPU 0") != std::string::npos;
    });
  }

  std::vector<std::string> errors, said;
  std::map<std::string, uint64_t> before, during, after;  // calls: ranks have a GPU; are done; let it go

 private:
  void note(std::vector<std::string>& list, const std::string& what) {
    std::lock_guard lock(mutex_);
    list.push_back(what);
  }
  void run(const Tried& tried, bool asynchronous, Communicator& communicator, const GpuRank& seat) {
    Begun begun;
    bool is_good = true;
    auto attempt = [&](auto&& what) {
      try {
        what();
      } catch (const Error& error) {
        is_good = false;
        note(errors, error.what());
      }
    };
    attempt([&] { begin(tried, asynchronous, communicator, seat, begun); });
    for (const auto& work : begun.works) {
      attempt([&] {
        work->wait();
        work->order(seat.stream);
      });
      if (work->error()) CHECK(work->has_landed());
      for (const Deadline deadline = Deadline::in(5); !work->has_landed(); usleep(100))
        CHECK(!deadline.passed());
    }
    for (const auto& [at, bytes] : begun.expected)
      if (is_good && !bytes.empty()) CHECK(seat.read(at, bytes.size()) == bytes);
  }
  std::mutex mutex_;
};

const std::vector<Tried> kByRings{{Operation::all_reduce},
                                  {Operation::reduce},
                                  {Operation::reduce_scatter},
                                  {Operation::all_gather},
                                  {Operation::broadcast}};
const std::vector<Tried> kByBlocks{{Operation::all_gather, true},
                                   {Operation::all_to_all},
                                   {Operation::gather},
                                   {Operation::scatter},
                                   {Operation::send}};

// Each driver call fails once at each place where it is made; a few of them without --whole.
void fail_each_call(uint32_t ranks, const std::vector<Tried>& operations) {
  uint64_t turn = 0, tried = 0;
  for (const Tried& operation : operations) {
    const Trial good(operation, ranks, "", true);
    CHECK(good.errors.empty());
    for (const auto& [name, calls] : good.after) {
      const bool stands_around = name.starts_with("cuCtx") || name.starts_with("cuThread");
      const auto begun = good.before.find(name);
      for (uint64_t call = 1 + (begun == good.before.end() ? 0 : begun->second); call <= calls; ++call) {
        if (++turn % (whole() ? 1 : stands_around ? 51 : 17) != 0) continue;
        const double start = now_s();
        const Trial bad(operation, ranks,
                        text("fail=%s:%llu:800 seed=%llu", name.c_str(), (unsigned long long)call,
                             (unsigned long long)turn),
                        turn % 2);
        CHECK(now_s() - start < 5);
        const auto made = bad.after.find(name);
        if (made == bad.after.end() || made->second < call) continue;  // landings were asked for fewer times
        tried += 1;
        for (const std::string& error : bad.errors) {
          CHECK_CONTAINS(error, name + " failed on GPU 0 (Fake, 0000:01:00.0)");
          CHECK_CONTAINS(error, "CUDA_ERROR_NOT_PERMITTED (800)");
          CHECK_CONTAINS(error, "rank ");
        }
        // Whoever has its error already may ask in vain whether a copy has ended.
        if (!stands_around && name != "cuStreamQuery") CHECK(!bad.errors.empty() || bad.told_of(name));
      }
    }
  }
  if (whole()) std::printf("%llu calls failed, each in a run of its own\n", (unsigned long long)tried);
  CHECK(tried > 5);
}

}  // namespace

TEST(each_driver_call_that_fails_once_ends_a_collective_of_two_ranks) {
  fail_each_call(2, kByRings);
}

TEST(each_driver_call_that_fails_once_ends_an_exchange_of_two_ranks) {
  fail_each_call(2, kByBlocks);
}

TEST_ANY_HOSTS(each_driver_call_that_fails_once_ends_a_collective_of_three_ranks) {
  fail_each_call(3, kByRings);
}

TEST_ANY_HOSTS(each_driver_call_that_fails_once_ends_an_exchange_of_three_ranks) {
  fail_each_call(3, kByBlocks);
}

TEST_ANY_HOSTS(a_barrier_of_ranks_with_gpus_makes_no_driver_call) {
  const Trial barrier({Operation::barrier}, 3, "", true), sum({Operation::all_reduce}, 3, "", true);
  CHECK(barrier.errors.empty() && barrier.during == barrier.before);
  CHECK(sum.errors.empty() && sum.during != sum.before);
}

TEST(the_fault_of_a_kernel_and_a_copy_that_never_ends_end_the_call_on_all_ranks) {
  for (const bool faults : {true, false}) {
    const double start = now_s();
    run_gpu_ranks(2, faults ? "" : "lasts=cuMemcpyDtoHAsync:1:1000000",
                  [&](Communicator& communicator, const GpuRank& seat) {
                    std::byte* const at = seat.tensor(ints(100, 0));
                    communicator.submit({Operation::barrier}, nullptr, nullptr)->wait();  // all have a GPU
                    if (faults && communicator.rank() == 1)
                      fake().launch(seat.stream, 0.01, {}, CUDA_ERROR_ILLEGAL_ADDRESS);
                    std::shared_ptr<Work> work;  // none, where the fault is there already
                    auto [kind, message] = error_of([&] {
                      work = communicator.submit(seat.all_reduce(at, 100, 0.4));
                      work->wait();
                    });
                    if (faults) CHECK_CONTAINS(message, "CUDA_ERROR_ILLEGAL_ADDRESS (700)");
                    if (faults && work) CHECK(work->has_landed());
                  });
    CHECK(now_s() - start < 10);
    fake().configure("");
  }
}
