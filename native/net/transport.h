// What carries the links of a process, as its user wishes.
#pragma once

#include <cstdint>

namespace photinus {

enum class Transport : uint8_t { tcp, ucx };

// PHOTINUS_TRANSPORT; TCP where it is not set. Throws Error(invalid_argument) for what is no transport.
Transport transport_of_environment();

}  // namespace photinus
