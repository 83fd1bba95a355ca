#include "net/transport.h"

#include <cstdlib>
#include <string>

#include "base/error.h"

namespace photinus {

Transport transport_of_environment() {
  const char* const set = std::getenv("PHOTINUS_TRANSPORT");
  const std::string name = set ? set : "";
  if (name.empty() || name == "tcp") return Transport::tcp;
  if (name == "ucx") return Transport::ucx;
  throw Error(ErrorKind::invalid_argument,
              "PHOTINUS_TRANSPORT is '" + name + "'; what carries tensors between hosts is tcp or ucx");
}

}  // namespace photinus
