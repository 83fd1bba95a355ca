// all_reduce among forked processes of this host.
//   all_reduce_bench RANKS [MAX_MIB [CHUNK_KIB]]   median time and S/t by size, in the arena and in ordinary
//   memory all_reduce_bench RANKS --driven PATH           does what it is told through the pipes in that
//   folder (driven.h)
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/clock.h"
#include "driven.h"
#include "engine/communicator.h"
#include "shm/local_group.h"

using namespace photinus;

namespace {

double median_s(Communicator& communicator, float* data, uint64_t elems, int rounds) {
  std::vector<double> times;
  for (int i = 0; i < rounds + 2; ++i) {
    communicator.submit({}, nullptr, nullptr, 0, false)->wait();
    double start = now_s();
    communicator
        .submit({Operation::all_reduce, Dtype::float32, Reduction::sum, 0, elems}, data, data, 0, false)
        ->wait();
    if (i >= 2) times.push_back(now_s() - start);
  }
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[static_cast<size_t>(rounds / 2)];
}

void run(uint32_t rank, uint32_t ranks, const std::string& address, uint64_t max_bytes,
         uint64_t chunk_bytes) {
  bench::pin(rank);
  Communicator::Options options;
  options.rank = rank;
  options.world_size = ranks;
  options.address = address;
  if (chunk_bytes) options.sizes.chunk_bytes = chunk_bytes;
  auto communicator = Communicator::create(options);
  for (uint64_t bytes = 4096; bytes <= max_bytes; bytes *= 4) {
    const uint64_t elems = bytes / sizeof(float);
    const int rounds = static_cast<int>(std::clamp<uint64_t>((uint64_t{1} << 28) / bytes, 7, 500));
    auto* shared = reinterpret_cast<float*>(communicator->arena()->allocate(bytes));
    std::vector<float> ordinary(elems, 0.0f);
    std::fill(shared, shared + elems, 0.0f);
    const double arena_s = median_s(*communicator, shared, elems, rounds);
    const double staged_s = median_s(*communicator, ordinary.data(), elems, rounds);
    const auto size = static_cast<double>(bytes);
    if (rank == 0)
      std::printf("%10llu B   arena %10.1f us %7.2f GB/s   ordinary %10.1f us %7.2f GB/s\n",
                  static_cast<unsigned long long>(bytes), arena_s * 1e6, size / arena_s / 1e9, staged_s * 1e6,
                  size / staged_s / 1e9);
    std::fflush(stdout);
    communicator->arena()->free(reinterpret_cast<std::byte*>(shared));
  }
  communicator->close();
}

}  // namespace

int main(int argc, char** argv) {
  const auto ranks = static_cast<uint32_t>(argc > 1 ? std::atoi(argv[1]) : 2);
  const bool is_driven = argc > 3 && std::strcmp(argv[2], "--driven") == 0;
  if (is_driven && ranks >= 1) return bench::driven(ranks, argv[3]);
  const uint64_t max_bytes = (argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 256) << 20;
  const uint64_t chunk_bytes = (argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 0) << 10;
  if (ranks < 1 || ranks > 128 || max_bytes == 0) {
    std::fprintf(stderr, "usage: all_reduce_bench RANKS [MAX_MIB [CHUNK_KIB] | --driven FOLDER]\n");
    return 2;
  }
  const std::string address = new_address();
  std::vector<pid_t> children;
  for (uint32_t rank = 1; rank < ranks; ++rank) {
    pid_t pid = fork();
    if (pid == 0) {
      run(rank, ranks, address, max_bytes, chunk_bytes);
      _exit(0);
    }
    children.push_back(pid);
  }
  run(0, ranks, address, max_bytes, chunk_bytes);
  for (pid_t pid : children) waitpid(pid, nullptr, 0);
  return 0;
}
