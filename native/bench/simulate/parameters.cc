#include "simulate/parameters.h"

#include <cmath>
#include <fstream>
#include <sstream>

#include "base/error.h"

namespace photinus::simulate {

const std::vector<Parameter>& parameters() {
  static const std::vector<Parameter> all = {
      {"rate-gbit", &Model::rate_gbit, "of a card, each way"},
      {"burst-bytes", &Model::burst_bytes,
       "that a card that was idle sends or takes at once, as a token bucket does"},
      {"latency-us", &Model::latency_us, "from one host's card to another's"},
      {"payload-bytes", &Model::payload_bytes, "of a packet"},
      {"header-bytes", &Model::header_bytes, "of a packet on the wire, beside its payload"},
      {"send-us", &Model::send_us, "processor time to send a frame"},
      {"receive-us", &Model::receive_us, "processor time to take in a frame, or what a rank tells"},
      {"socket-ns", &Model::socket_ns, "processor time per byte to send, and again to receive"},
      {"copy-ns", &Model::copy_ns, "per byte that is copied"},
      {"add-ns", &Model::add_ns, "per byte that is added to another"},
      {"counter-us", &Model::counter_us, "until ranks of a host see what one has done"},
      {"call-us", &Model::call_us, "of a call, besides its steps"},
      {"cores", &Model::cores, "of a host; 0: one for each rank"},
      {"machines", &Model::machines, "that all hosts share: with 1, `cores` are those of all hosts; 0: none"},
      {"switch-us", &Model::switch_us, "when a core goes over to another rank"},
      {"spin-us", &Model::spin_us, "for which a rank that waits does not sleep"},
      {"wake-us", &Model::wake_us, "until one that sleeps runs"},
      {"leaf-hosts", &Model::leaf_hosts, "hosts at one switch; 0: all"},
      {"oversubscription", &Model::oversubscription, "cards' rate of a switch / what it has towards others"},
      {"jitter-us", &Model::jitter_us,
       "mean of what a frame's latency is longer by, exponentially distributed"},
      {"seed", &Model::seed, "of jitter"},
  };
  return all;
}

bool set(Model& model, const std::string& name, const std::string& value) {
  for (const Parameter& parameter : parameters()) {
    if (name != parameter.name) continue;
    char* end = nullptr;
    const double number = std::strtod(value.c_str(), &end);
    const bool divides = name == "rate-gbit" || name == "payload-bytes" || name == "oversubscription";
    if (value.empty() || *end || !std::isfinite(number) || number < 0 || (divides && number == 0))
      throw Error(ErrorKind::invalid_argument, text("%s must be a number %s 0, and is '%s'", name.c_str(),
                                                    divides ? "above" : "from", value.c_str()));
    model.*parameter.value = number;
    return true;
  }
  return false;
}

void read(Model& model, const std::string& file) {
  std::ifstream in(file);
  if (!in) throw Error(ErrorKind::invalid_argument, "the model " + file + " cannot be read");
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line.substr(0, line.find('#')));
    std::string name, value, more;
    if (!(words >> name)) continue;
    if (!(words >> value) || words >> more || !set(model, name, value))
      throw Error(ErrorKind::invalid_argument,
                  file + ": '" + line + "' is not the name of a parameter and its value");
  }
}

}  // namespace photinus::simulate
