#include <cstring>
#include <random>

#include "check.h"

using namespace photinus;

TEST(blocks_are_aligned_apart_and_reused_after_they_are_freed) {
  Arena arena(1 << 20);
  std::byte* small = arena.allocate(10);
  std::byte* large = arena.allocate(5000);
  CHECK(reinterpret_cast<uintptr_t>(small) % 64 == 0);
  CHECK(reinterpret_cast<uintptr_t>(large) % 4096 == 0);
  CHECK(large >= small + 64 || small >= large + 8192);
  arena.free(small);
  CHECK(arena.allocate(64) == small);
  CHECK(arena.used_bytes() == 64 + 8192);
}

TEST(random_use_never_overlaps_and_leaves_one_gap) {
  Arena arena(4 << 20);
  std::mt19937 random(1);
  std::vector<std::pair<std::byte*, size_t>> blocks;
  for (int i = 0; i < 3000; ++i) {
    if (blocks.size() > 40 || (!blocks.empty() && random() % 2)) {
      size_t victim = random() % blocks.size();
      auto [at, bytes] = blocks[victim];
      for (size_t b = 0; b < bytes; b += 61) CHECK(at[b] == static_cast<std::byte>(bytes % 251));
      arena.free(at);
      blocks.erase(blocks.begin() + static_cast<long>(victim));
    } else {
      size_t bytes = 1 + random() % 60000;
      std::byte* at = arena.allocate(bytes);
      std::memset(at, static_cast<int>(bytes % 251), bytes);
      blocks.push_back({at, bytes});
    }
  }
  for (auto [at, bytes] : blocks) arena.free(at);
  CHECK(arena.used_bytes() == 0);
  arena.free(arena.allocate(4 << 20));  // the whole arena is one gap again
}

TEST(an_allocation_without_a_gap_says_what_is_in_use) {
  Arena arena(1 << 16);
  arena.allocate(1 << 15);
  auto [kind, message] = test::error_of([&] { arena.allocate(1 << 16); });
  CHECK(kind == ErrorKind::system);
  CHECK_CONTAINS(message, "65536 bytes");
  CHECK_CONTAINS(message, "in use 32768");
}

TEST(only_ranges_wholly_inside_are_in_the_arena) {
  Arena arena(1 << 16);
  std::byte* base = arena.segment()->base();
  CHECK(arena.offset(base + 100, 50) == size_t{100});
  CHECK(!arena.offset(base + arena.segment()->bytes() - 10, 11));
  int elsewhere = 0;
  CHECK(!arena.offset(&elsewhere, sizeof elsewhere));
}
