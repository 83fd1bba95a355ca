// Random operations, sizes, groups and threads for as long as one likes; every result is compared with the
// naive one.
//   soak [--processes | --cuda] [--hosts LAYOUT] [SECONDS [RANKS [SEED]]]
// Ranks are threads of this process (for the sanitizers), or processes; on one host, or on several. With
// --cuda most tensors lie in the memory of a GPU, over the driver that is none (fake_cuda/), and ranks are
// threads: those of the driver would not go on in forked children.
// Each rank has two calling threads with groups of their own: the world and, by turns, subsets of it. Exits 1
// at the first wrong result, and when the memory in use has grown between the first fifth and the end.
#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "collectives/naive.h"
#include "cuda_rig.h"
#include "data.h"
#include "device/cuda/cuda_device.h"
#include "engine/communicator.h"
#include "layouts.h"
#include "progress/progress.h"
#include "shm/local_group.h"

#if defined(__SANITIZE_ADDRESS__)
// Freed memory is kept for a while to catch late uses; by default so much that it would look like growth.
extern "C" const char* __asan_default_options() {
  return "quarantine_size_mb=16:thread_local_quarantine_size_kb=64";
}
#endif

using namespace photinus;
using namespace photinus::test;

namespace {

constexpr uint32_t kCallers = 2, kGroups = 3;  // calling threads of a rank; groups of each
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kGrowthLimit = 160 << 20;  // their own books grow with the stacks that they have seen
#else
constexpr uint64_t kGrowthLimit = 4 << 20;
#endif

struct Soak {
  double seconds = 5;
  uint32_t ranks = 4;
  uint64_t seed = 1;
  std::string addresses[kCallers][kGroups];
  std::vector<HostPlace> places = {};
  bool cuda = false;
};

[[noreturn]] void give_up(const std::string& what) {
  std::fprintf(stderr, "soak: %s\n", what.c_str());
  std::fflush(nullptr);
  _exit(1);
}

// What lives on the heap and what is mapped of files and shared memory. Under the sanitizers, which have an
// allocator of their own, all that is resident. (Elsewhere that would count what malloc keeps of freed memory
// too: some MiB for each of its arenas, more with each new thread for a while, which looks like a leak and
// hides one.)
uint64_t bytes_in_use() {
  unsigned long long total = 0, resident = 0, mapped = 0;
  if (FILE* file = std::fopen("/proc/self/statm", "re")) {
    if (std::fscanf(file, "%llu %llu %llu", &total, &resident, &mapped) != 3) resident = mapped = 0;
    std::fclose(file);
  }
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return resident * page;
#else
  const struct mallinfo2 heap = mallinfo2();
  return mapped * page + heap.uordblks + heap.hblkhd;
#endif
}

// The ranks of group `index`: all; without the last; the even ones.
std::vector<uint32_t> members(const Soak& plan, uint32_t index) {
  std::vector<uint32_t> ranks;
  for (uint32_t r = 0; r < plan.ranks; ++r)
    if (index == 0 || (index == 1 ? r + 1 < plan.ranks || plan.ranks == 1 : r % 2 == 0)) ranks.push_back(r);
  return ranks;
}

// One operation in flight, with what it should give.
struct Job {
  std::shared_ptr<Work> work;
  Dtype dtype = Dtype::uint8;
  std::vector<std::byte*> blocks;   // in the arena
  std::vector<std::byte*> tensors;  // on a GPU
  std::vector<std::unique_ptr<Bytes>> memory;
  std::vector<std::pair<const std::byte*, Bytes>> expected;
  std::string what;
  bool on_a_gpu = false;
};

class Caller {
 public:
  Caller(const Soak& plan, uint32_t rank, uint32_t index, std::shared_ptr<Progress> progress,
         std::shared_ptr<Network> network, std::shared_ptr<cuda::CudaDevice> gpu)
      : plan_(plan),
        rank_(rank),
        progress_(std::move(progress)),
        gpu_(std::move(gpu)),
        stream_(gpu_ ? fake().make_stream(false) : nullptr),
        random_(plan.seed * 1000 + index) {
    for (uint32_t g = 0; g < kGroups; ++g) {
      const auto ranks = members(plan, g);
      const auto me = std::find(ranks.begin(), ranks.end(), rank);
      groups_.push_back(nullptr);
      if (me == ranks.end()) continue;
      Communicator::Options options;
      options.rank = static_cast<uint32_t>(me - ranks.begin());
      options.world_size = static_cast<uint32_t>(ranks.size());
      options.address = plan.addresses[index][g];
      options.name = text("caller %u's group %u", index, g);
      options.progress = progress_;
      options.limits.timeout_s = 120;
      options.sizes = {4096, 8192, 4};
      options.device_sizes = {8192, 4};
      options.network = network;
      std::vector<std::string> hosts;
      for (const uint32_t member : layout() ? ranks : std::vector<uint32_t>{}) {
        options.places.push_back(plan.places[member]);
        hosts.push_back(plan.places[member].host_key);
      }
      if (layout()) levels_[g] = levels_of(hosts);
      groups_.back() = Communicator::create(options);
    }
  }

  // All ranks draw the same numbers, so they agree on what comes next; whatever is a rank's own comes from
  // `own_`.
  uint64_t run(double until_s) {
    uint64_t count = 0;
    std::vector<Job> jobs;
    while (true) {
      // All decide together when it is over.
      float go = now_s() < until_s ? 1 : 0;
      groups_[0]
          ->submit({Operation::all_reduce, Dtype::float32, Reduction::min, 0, 1}, &go, &go, 0, false)
          ->wait();
      if (go == 0 && count > 0) break;  // some, however long it took to meet
      for (int i = 0; i < 40; ++i, ++count) {
        start(jobs);
        if (jobs.size() > random_() % 8) finish(jobs);
      }
      finish(jobs);
    }
    for (auto& group : groups_)
      if (group) group->close();
    return count;
  }

 private:
  std::byte* place(Job& job, const Bytes& content, bool in_arena) {
    if (job.on_a_gpu) {
      job.tensors.push_back(static_cast<std::byte*>(fake().allocate(content.size() + 1)));
      fake().launch(stream_, own_() % 8 ? 0 : 1e-4,
                    [to = job.tensors.back(), content] { std::copy(content.begin(), content.end(), to); });
      return job.tensors.back();
    }
    if (in_arena) {
      job.blocks.push_back(progress_->arena()->allocate(content.size() + 1));
      std::copy(content.begin(), content.end(), job.blocks.back());
      return job.blocks.back();
    }
    job.memory.push_back(std::make_unique<Bytes>(content));
    job.memory.back()->resize(content.size() + 1);
    return job.memory.back()->data();
  }

  void start(std::vector<Job>& jobs) {
    const uint32_t g = random_() % kGroups;
    const auto ranks = static_cast<uint32_t>(members(plan_, g).size());
    const Operation operations[] = {Operation::all_reduce, Operation::reduce,     Operation::broadcast,
                                    Operation::all_gather, Operation::barrier,    Operation::reduce_scatter,
                                    Operation::all_to_all, Operation::all_reduce, Operation::send};
    Call call;
    call.operation = operations[random_() % std::size(operations)];
    do {
      call.dtype = kAllDtypes[random_() % std::size(kAllDtypes)];
      call.reduction = kAllReductions[random_() % std::size(kAllReductions)];
    } while (!exists(call.dtype, call.reduction));
    call.root = has_root(call.operation) ? random_() % ranks : 0;
    const uint64_t scale = random_() % 10;
    call.elems = random_() % (scale < 6 ? 200 : scale < 9 ? 5000 : 60000);
    const uint64_t seed = random_(), in_arena = random_();
    const bool on_gpu = plan_.cuda && random_() % 4 > 0;
    Communicator* group = groups_[g].get();
    if (!group) return;
    jobs.emplace_back();
    Job& job = jobs.back();
    job.dtype = call.dtype;
    job.on_a_gpu = on_gpu && call.operation != Operation::barrier;
    const bool asynchronous = own_() % 2,
               mine_in_arena = in_arena % 3 == 0 || (in_arena % 3 == 1 && own_() % 2);
    if (call.operation == Operation::send)
      pass_on(*group, job, call, seed, mine_in_arena);
    else if (call.operation == Operation::all_to_all)
      exchange(*group, job, call, seed, mine_in_arena, asynchronous);
    else
      collective(g, job, call, seed, mine_in_arena, asynchronous);
    if (own_() % 50 == 0) usleep(static_cast<useconds_t>(own_() % 2000));
  }

  void collective(uint32_t g, Job& job, const Call& call, uint64_t seed, bool in_arena, bool asynchronous) {
    Communicator& group = *groups_[g];
    const uint32_t ranks = group.world_size(), me = group.rank();
    const bool scatters = call.operation == Operation::reduce_scatter;
    std::vector<Bytes> inputs;
    std::vector<double> factors;
    std::mt19937_64 random(seed);
    for (uint32_t r = 0; r < ranks; ++r) {
      inputs.push_back(random_elements(call.dtype, scatters ? call.elems * ranks : call.elems, random));
      factors.push_back(1.0 / (r + 1));
    }
    Submission given;
    given.call = call;
    given.factor = factors[me];
    given.asynchronous = asynchronous;
    if (call.operation == Operation::barrier) {
      given.call.elems = 0;
    } else {
      const Bytes result = naive(call, inputs, factors, levels_[g])[me];
      std::byte* send = place(job, inputs[me], in_arena);
      const bool in_place = call.operation != Operation::all_gather && !scatters;
      std::byte* recv = in_place ? send : place(job, Bytes(result.size()), in_arena);
      given.send = send;
      given.recv = recv;
      job.expected.push_back({recv, result});
    }
    job.what = describe(call);
    job.work = group.submit(on_device(job, std::move(given)));
    if (!asynchronous) job.work->wait();  // it runs only while somebody waits for it
  }

  void exchange(Communicator& group, Job& job, const Call& call, uint64_t seed, bool in_arena,
                bool asynchronous) {
    const uint32_t ranks = group.world_size(), me = group.rank();
    auto content = [&](uint32_t from, uint32_t to) {
      std::mt19937_64 random(seed + from * 131 + to);
      return random_elements(call.dtype, random() % (call.elems + 1), random);
    };
    Submission given;
    given.call = call;
    given.call.elems = 0;
    given.asynchronous = asynchronous;
    const uint64_t size = size_bytes(call.dtype);
    for (uint32_t peer = 0; peer < ranks; ++peer) {
      const Bytes out = content(me, peer), in = content(peer, me);
      given.send_parts.push_back({place(job, out, in_arena), out.size() / size});
      given.recv_parts.push_back({place(job, Bytes(in.size()), false), in.size() / size});
      job.expected.push_back({static_cast<std::byte*>(given.recv_parts.back().buffer), in});
    }
    job.what = "all_to_all";
    job.work = group.submit(on_device(job, std::move(given)));
    if (!asynchronous) job.work->wait();
  }

  // Everyone sends to the next rank; the receive is waited for in the same job.
  void pass_on(Communicator& group, Job& job, const Call& call, uint64_t seed, bool in_arena) {
    const uint32_t ranks = group.world_size(), me = group.rank();
    if (ranks == 1) {
      job.what = "nothing";
      return;
    }
    auto content = [&](uint32_t from) {
      std::mt19937_64 random(seed + from);
      return random_elements(call.dtype, call.elems, random);
    };
    const Bytes in = content((me + ranks - 1) % ranks);
    MessageCall message;
    if (job.on_a_gpu) message.device = gpu_, message.stream = stream_;
    message.dtype = call.dtype;
    message.elems = call.elems;
    message.tag = static_cast<int64_t>(seed % 3);
    message.buffer = place(job, content(me), in_arena);
    message.peer = (me + 1) % ranks;
    auto sent = group.submit(message);
    message.operation = Operation::recv;
    message.buffer = place(job, Bytes(in.size()), false);
    message.peer = (me + ranks - 1) % ranks;
    job.expected.push_back({static_cast<std::byte*>(message.buffer), in});
    job.what = "send and recv";
    const auto received = group.submit(message);
    received->wait();
    if (job.on_a_gpu) received->order(stream_);
    job.work = sent;
  }

  void finish(std::vector<Job>& jobs) {
    std::shuffle(jobs.begin(), jobs.end(), own_);
    for (Job& job : jobs) {
      if (job.work) job.work->wait();
      if (job.work && job.on_a_gpu) settle(*job.work);
      for (const auto& [address, bytes] : job.expected)
        if (!same(job.dtype, address, bytes.data(), bytes.size() / size_bytes(job.dtype)))
          give_up(text("rank %u: wrong result of %s", rank_, job.what.c_str()));
      for (std::byte* block : job.blocks) progress_->arena()->free(block);
      for (std::byte* tensor : job.tensors) fake().release(tensor);
    }
    jobs.clear();
  }

  Submission on_device(const Job& job, Submission given) const {
    if (job.on_a_gpu) given.device = gpu_, given.stream = stream_;
    return given;
  }
  // Until what is in the caller's stream behind the work has run.
  void settle(Work& work) const {
    work.order(stream_);
    auto ran = std::make_shared<std::atomic<bool>>(false);
    fake().launch(stream_, 0, [ran] { ran->store(true); });
    for (const Deadline deadline = Deadline::in(60); !ran->load() || !work.has_landed(); usleep(20))
      if (deadline.passed()) give_up("a stream does not end");
  }

  const Soak& plan_;
  uint32_t rank_;
  std::shared_ptr<Progress> progress_;
  std::shared_ptr<cuda::CudaDevice> gpu_;
  cuda::CUstream stream_;
  std::mt19937_64 random_, own_{std::random_device{}()};
  std::vector<std::shared_ptr<Communicator>> groups_;
  Levels levels_[kGroups];
};

uint64_t run_rank(const Soak& plan, uint32_t rank, const std::shared_ptr<Progress>& progress,
                  const std::shared_ptr<Network>& network) {
  const double end_s = now_s() + plan.seconds;
  const auto gpu = plan.cuda ? std::make_shared<cuda::CudaDevice>(driver(), 0) : nullptr;
  std::vector<std::thread> threads;
  std::atomic<uint64_t> count{0};
  for (uint32_t index = 0; index < kCallers; ++index)
    threads.emplace_back([&, index] {
      try {
        count += Caller(plan, rank, index, progress, network, gpu).run(end_s);
      } catch (const std::exception& error) {
        give_up(text("rank %u: %s", rank, error.what()));
      }
    });
  for (auto& thread : threads) thread.join();
  return count;
}

// Runs all ranks in this process.
uint64_t run_threads(Soak& plan) {
  Listeners listeners = listeners_of(plan.ranks);
  plan.places = listeners.places;
  std::vector<std::thread> ranks;
  std::atomic<uint64_t> count{0};
  for (uint32_t rank = 0; rank < plan.ranks; ++rank)
    ranks.emplace_back([&, rank] {
      count += run_rank(plan, rank, std::make_shared<Progress>(std::make_shared<Arena>(size_t{256} << 20)),
                        layout() ? listeners.networks[rank] : nullptr);
    });
  for (auto& rank : ranks) rank.join();
  return count;
}

uint64_t run_processes(Soak& plan) {
  plan.places = listeners_of(plan.ranks).places;  // ports that are free now; each process listens on its own
  auto run = [&](uint32_t rank) {
    return run_rank(plan, rank, Progress::of_this_process(),
                    layout() ? std::make_shared<Network>(plan.places[rank].addresses) : nullptr);
  };
  std::vector<pid_t> children;
  for (uint32_t rank = 1; rank < plan.ranks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      run(rank);
      _exit(0);
    }
    children.push_back(pid);
  }
  const uint64_t count = run(0);
  for (pid_t pid : children) {
    int status = 0;
    if (waitpid(pid, &status, 0) != pid || status != 0) give_up("a rank failed");
  }
  return count;
}

}  // namespace

int main(int argc, char** argv) {
  const bool processes = argc > 1 && std::strcmp(argv[1], "--processes") == 0;
  Soak plan;
  plan.cuda = argc > 1 && std::strcmp(argv[1], "--cuda") == 0;
  if (processes || plan.cuda) --argc, ++argv;
  if (argc > 2 && std::strcmp(argv[1], "--hosts") == 0) {
    layout() = argv[2];
    argc -= 2, argv += 2;
  }
  if (argc > 1) plan.seconds = std::atof(argv[1]);
  if (argc > 2) plan.ranks = static_cast<uint32_t>(std::atoi(argv[2]));
  plan.seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : std::random_device{}();
  // As the Python module says of a process with threads: the second caller may come late to its first call.
  Progress::set_thread_check([] { return true; });
  if (!(plan.seconds > 0) || plan.ranks < 1 || plan.ranks > 64) {
    std::fprintf(stderr, "usage: soak [--processes | --cuda] [--hosts LAYOUT] [SECONDS [RANKS [SEED]]]\n");
    return 2;
  }
  std::printf("seed %llu\n", static_cast<unsigned long long>(plan.seed));
  std::fflush(stdout);
  uint64_t total = 0, first_bytes = 0;
  const double start_s = now_s(), seconds = plan.seconds;
  for (int part = 0; part < 10 || now_s() - start_s < seconds; ++part) {
    plan.seconds = seconds / 10;
    if (plan.cuda) fake().configure(text("seed=%llu", (unsigned long long)plan.seed));
    for (auto& caller : plan.addresses)
      for (std::string& address : caller) address = new_address();
    total += processes ? run_processes(plan) : run_threads(plan);
    if (plan.cuda && !fake().alive().empty()) give_up("the driver still has " + fake().alive());
    ++plan.seed;
    if (part == 1) first_bytes = bytes_in_use();
    if (part >= 9 && now_s() - start_s >= seconds) break;
  }
  const uint64_t last_bytes = bytes_in_use();
  std::printf("%llu operations in %.0f s, %llu KiB in use after a fifth, %llu KiB at the end\n",
              static_cast<unsigned long long>(total), now_s() - start_s,
              static_cast<unsigned long long>(first_bytes >> 10),
              static_cast<unsigned long long>(last_bytes >> 10));
  if (last_bytes > first_bytes + kGrowthLimit) give_up("memory has grown");
  return 0;
}
