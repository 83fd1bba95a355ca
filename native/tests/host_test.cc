#include "device/host.h"

#include <algorithm>

#include "check.h"

using namespace photinus;

TEST(a_streaming_copy_moves_every_byte_and_no_other_whatever_the_alignment) {
  std::vector<unsigned char> from(1024), to(1024), expected(1024);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 7 + 1);
  for (size_t bytes : {0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 640, 700}) {
    for (size_t to_shift : {0, 1, 15, 16, 63, 64}) {
      for (size_t from_shift : {0, 1, 16, 33}) {
        std::fill(to.begin(), to.end(), static_cast<unsigned char>(0xee));
        expected = to;
        std::copy_n(from.begin() + static_cast<long>(from_shift), bytes,
                    expected.begin() + static_cast<long>(to_shift));
        host::copy_streaming(to.data() + to_shift, from.data() + from_shift, bytes);
        CHECK(to == expected);
      }
    }
  }
}
