#include "base/dtype.h"

namespace photinus {

size_t size_bytes(Dtype dtype) {
  constexpr size_t sizes[kDtypeCount] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 1};
  return sizes[static_cast<size_t>(dtype)];
}

const char* name(Dtype dtype) {
  constexpr const char* names[kDtypeCount] = {"float32", "float64", "float16", "bfloat16", "int8",
                                              "int16",   "int32",   "int64",   "uint8",    "bool"};
  return names[static_cast<size_t>(dtype)];
}

const char* name(Reduction reduction) {
  constexpr const char* names[kReductionCount] = {"sum",  "avg", "min",  "max",       "product",
                                                  "band", "bor", "bxor", "premul_sum"};
  return names[static_cast<size_t>(reduction)];
}

const char* name(Operation operation) {
  constexpr const char* names[kOperationCount] = {"all_reduce", "broadcast", "all_gather", "reduce_scatter",
                                                  "barrier",    "reduce",    "all_to_all", "gather",
                                                  "scatter",    "send",      "recv"};
  return names[static_cast<size_t>(operation)];
}

bool has_reduction(Operation operation) {
  return operation == Operation::all_reduce || operation == Operation::reduce_scatter ||
         operation == Operation::reduce;
}

bool takes_parts(Operation operation) {
  return operation == Operation::all_to_all || operation == Operation::gather ||
         operation == Operation::scatter;
}

bool has_root(Operation operation) {
  return operation == Operation::broadcast || operation == Operation::reduce ||
         operation == Operation::gather || operation == Operation::scatter;
}

}  // namespace photinus
