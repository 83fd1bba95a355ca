#include "driven.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "base/clock.h"
#include "collectives/slices.h"
#include "engine/communicator.h"
#include "moving_loop.h"
#include "shm/local_group.h"

namespace photinus::bench {
namespace {

// Address space; pages are taken when touched.
constexpr uint64_t kArenaBytes = uint64_t{4} << 30, kTensorBytes = uint64_t{1} << 30;

class Rank {
 public:
  // `arenas` and `tensors`, a block of kTensorBytes in each, were made before the fork, so that each rank
  // knows where its peers' tensors lie. The engine gets the own arena.
  Rank(uint32_t rank, const std::string& address, const std::vector<std::shared_ptr<Arena>>& arenas,
       const std::vector<std::byte*>& tensors)
      : rank_(rank), tensors_(tensors) {
    Communicator::Options options;
    options.rank = rank;
    options.world_size = static_cast<uint32_t>(tensors.size());
    options.address = address;
    options.progress = std::make_shared<Progress>(arenas[rank]);
    communicator_ = Communicator::create(options);
  }

  void prepare(const std::string& type, uint64_t bytes) {
    dtype_ = type == "bfloat16" ? Dtype::bfloat16 : Dtype::float32;
    bytes_ = bytes;
    if (bytes > kTensorBytes) throw std::invalid_argument("tensors of 1 GiB are the largest");
    ordinary_ = {};
    madvise(tensors_[rank_], kTensorBytes, MADV_REMOVE);  // other pages each time
    std::memset(tensors_[rank_], 0, bytes);
    ordinary_.resize(bytes);
    barrier();
  }

  double run(const std::string& path, uint64_t calls) {
    const bool moving = path == "moving";
    std::byte* data = path == "ordinary" ? ordinary_.data() : tensors_[rank_];
    auto once = [&] { moving ? move() : all_reduce(data); };
    for (uint64_t i = 0; i <= calls / 10; ++i) once();
    barrier();
    const double start = now_s();
    for (uint64_t i = 0; i < calls; ++i) once();
    if (moving) barrier();  // the calls of the others end by themselves only when all have ended
    return (now_s() - start) / static_cast<double>(calls);
  }

  void close() { communicator_->close(); }

 private:
  void barrier() { communicator_->submit({}, nullptr, nullptr, 0, false)->wait(); }

  void all_reduce(std::byte* data) {
    const Call call{Operation::all_reduce, dtype_, Reduction::sum, 0, bytes_ / size_bytes(dtype_)};
    communicator_->submit(call, data, data, 0, false)->wait();
  }

  void move() {
    const Slice mine = slice_of(bytes_, static_cast<uint32_t>(tensors_.size()), rank_, kLineBytes);
    move_slice(tensors_, mine.first, mine.elems / kLineBytes * kLineBytes);
  }

  uint32_t rank_;
  std::vector<std::byte*> tensors_;  // in the arena, of every rank
  std::vector<std::byte> ordinary_;
  std::shared_ptr<Communicator> communicator_;
  Dtype dtype_ = Dtype::float32;
  uint64_t bytes_ = 0;
};

void serve(Rank& rank, std::istream& commands, std::ostream& answers) {
  for (std::string line; std::getline(commands, line);) {
    std::istringstream words(line);
    std::string verb, name;
    uint64_t number = 0;
    words >> verb >> name >> number;
    if (verb == "prepare") {
      rank.prepare(name, number);
      answers << "{}" << std::endl;
    } else if (verb == "run") {
      answers.precision(9);
      answers << "{\"s\": " << rank.run(name, number) << "}" << std::endl;
    } else {
      return;
    }
  }
}

// A forked child's copy of an arena is private (shm/segment.h). Ranks need to share these, also to wake each
// other.
void share_again(const Arena& arena) {
  const Segment& segment = *arena.segment();
  if (mmap(segment.base(), segment.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
           segment.file(), 0) == MAP_FAILED)
    throw std::runtime_error("cannot map an arena");
}

int run_rank(uint32_t index, const std::string& address, const std::string& folder,
             const std::vector<std::shared_ptr<Arena>>& arenas, const std::vector<std::byte*>& tensors) {
  const std::string pipe = folder + "/" + std::to_string(index);
  std::ofstream answers(pipe + ".out");
  std::ifstream commands(pipe + ".in");
  try {
    pin(index);
    for (const auto& arena : arenas) share_again(*arena);
    Rank rank(index, address, arenas, tensors);
    answers << "{\"ready\": \"photinus native\"}" << std::endl;
    serve(rank, commands, answers);
    rank.close();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %u: %s\n", index, error.what());
    return 1;
  }
}

}  // namespace

void pin(uint32_t rank) {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  if (sched_getaffinity(0, sizeof usable, &usable) != 0) return;
  int skip = static_cast<int>(rank) % CPU_COUNT(&usable), core = 0;
  while (!CPU_ISSET(core, &usable) || skip-- > 0) ++core;
  cpu_set_t own;
  CPU_ZERO(&own);
  CPU_SET(core, &own);
  sched_setaffinity(0, sizeof own, &own);
}

int driven(uint32_t ranks, const std::string& folder) {
  const std::string address = new_address();
  std::vector<std::shared_ptr<Arena>> arenas;
  std::vector<std::byte*> tensors;
  for (uint32_t i = 0; i < ranks; ++i) {
    arenas.push_back(std::make_shared<Arena>(kArenaBytes));
    tensors.push_back(arenas.back()->allocate(kTensorBytes));
  }
  std::vector<pid_t> children;
  for (uint32_t i = 0; i < ranks; ++i) {
    const pid_t pid = fork();
    if (pid == 0) _exit(run_rank(i, address, folder, arenas, tensors));
    children.push_back(pid);
  }
  int failed = 0, status = 0;
  for (pid_t pid : children) failed |= waitpid(pid, &status, 0) != pid || status != 0;
  return failed;
}

}  // namespace photinus::bench
