// The obvious reference of every collective: all ranks' tensors in one place, one element after the other, in
// rank order. Shares no arithmetic with the kernels. Tests hold everything fast against it.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/plan.h"

namespace photinus {

using Bytes = std::vector<std::byte>;

// inputs[r] is what rank r sends; returns what each rank has received afterwards. factors[r] is what
// premul_sum multiplies rank r's input by; none at all means that all are 1.
std::vector<Bytes> naive(const Call& call, const std::vector<Bytes>& inputs,
                         const std::vector<double>& factors = {});

}  // namespace photinus
