// The obvious reference of every collective: all ranks' tensors in one place, one element after the other, by
// recursion down the tree that kernels/reduce.h and collectives/levels.h describe. Shares no arithmetic with
// the kernels. Tests hold everything fast against it.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/levels.h"
#include "collectives/plan.h"

namespace photinus {

using Bytes = std::vector<std::byte>;

// inputs[r] is what rank r sends; returns what each rank has received afterwards. factors[r] is what
// premul_sum multiplies rank r's input by; none at all means that all are 1. Without levels, all ranks are on
// one host, in their order.
std::vector<Bytes> naive(const Call& call, const std::vector<Bytes>& inputs,
                         const std::vector<double>& factors = {}, const Levels& levels = {});

}  // namespace photinus
