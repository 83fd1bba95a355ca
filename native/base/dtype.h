// Element types, reductions and operations: codes that stand in shared memory and in the Python tables, with
// names.
#pragma once

#include <cstddef>
#include <cstdint>

namespace photinus {

enum class Dtype : uint8_t { float32, float64, float16, bfloat16, int8, int16, int32, int64, uint8, boolean };
inline constexpr uint8_t kDtypeCount = 10;

// Where a tensor lies.
enum class DeviceType : uint8_t { cpu, cuda };

// avg divides the sum by the number of ranks: floating types once, after the sum (narrow ones before their
// one rounding); integers truncate towards zero. On boolean, sum and max are "or", product and min are "and".
// band, bor and bxor are bitwise and mean nothing on floating types; on boolean they are logical. premul_sum,
// on floating types alone, multiplies what each rank brings by a factor of that rank's own before it adds.
enum class Reduction : uint8_t { sum, avg, min, max, product, band, bor, bxor, premul_sum };
inline constexpr uint8_t kReductionCount = 9;

enum class Operation : uint8_t {
  all_reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  barrier,
  reduce,
  all_to_all,
  gather,
  scatter,
  send,
  recv,
};
inline constexpr uint8_t kOperationCount = 11;

size_t size_bytes(Dtype dtype);
const char* name(Dtype dtype);
const char* name(Reduction reduction);
const char* name(Operation operation);
bool has_reduction(Operation operation);
bool has_root(Operation operation);
// Whether each pair of ranks has a size of its own. (all_gather can have it too.)
bool takes_parts(Operation operation);

}  // namespace photinus
