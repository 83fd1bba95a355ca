#include "collectives/plan.h"

#include "base/error.h"

namespace photinus {
namespace {

const char* name(Counter counter) {
  constexpr const char* names[kCounterCount] = {"posted", "staged", "reduced", "finished", "returned"};
  return names[static_cast<size_t>(counter)];
}

std::string print(const Region& region) {
  constexpr const char* names[] = {"-",         "send",      "recv",    "flat",         "slot",
                                   "send_part", "recv_part", "landing", "landing_ring", "result_ring"};
  if (region.place == Place::send_part || region.place == Place::recv_part)
    return text("%s[%u:%u]+%llu", names[static_cast<size_t>(region.place)], region.rank, region.part,
                static_cast<unsigned long long>(region.offset_bytes));
  return text("%s[%u]+%llu", names[static_cast<size_t>(region.place)], region.rank,
              static_cast<unsigned long long>(region.offset_bytes));
}

std::string print(const std::vector<Region>& regions) {
  std::string out;
  for (const Region& region : regions) out += (out.empty() ? "" : " ") + print(region);
  return out;
}

std::string print(const Step& step) {
  auto bytes = static_cast<unsigned long long>(step.bytes),
       value = static_cast<unsigned long long>(step.value);
  switch (step.kind) {
    case Step::Kind::copy:
      return text("copy %llu %s <- %s", bytes, print(step.to).c_str(), print(step.from).c_str());
    case Step::Kind::reduce: {
      std::string how = "reduce";
      if (step.kernel) how += std::string(" (") + name(step.kernel->reduction) + ")";
      if (step.kernel && step.kernel->from != step.kernel->to)
        how += std::string(" ") + name(step.kernel->from) + " to " + name(step.kernel->to);
      return text("%s %llu %s <- %s", how.c_str(), bytes, print(step.results).c_str(),
                  print(step.sources).c_str());
    }
    case Step::Kind::advance:
      return text("advance %s to %llu", name(step.counter), value);
    case Step::Kind::wait:
      return step.rank == kEveryone
                 ? text("wait until all %s %llu", name(step.counter), value)
                 : text("wait until rank %u %s %llu", step.rank, name(step.counter), value);
    case Step::Kind::send:
      return text("send %llu to rank %u <- %s", bytes, step.rank, print(step.from).c_str());
    case Step::Kind::receive:
      return text("receive %llu from rank %u -> %s", bytes, step.rank, print(step.to).c_str());
    case Step::Kind::wait_sent:
      return text("wait until rank %u was sent %llu", step.rank, value);
    case Step::Kind::wait_received:
      return text("wait until rank %u has sent %llu", step.rank, value);
    case Step::Kind::tell:
      return text("tell level %llu", value);
    case Step::Kind::hear:
      return text("hear level %llu", value);
    case Step::Kind::start_copy:
      return text("start to copy %llu %s <- %s", bytes, print(step.to).c_str(), print(step.from).c_str());
    case Step::Kind::wait_copied:
      return text("wait until %llu copies to the host have landed", value);
    case Step::Kind::wait_room:
      return step.rank == kEveryone
                 ? text("wait until there is room for result %llu", value)
                 : text("wait until rank %u leaves room for result %llu", step.rank, value);
    case Step::Kind::let_go:
      return text("let go of result %llu", value);
  }
  return "?";
}

}  // namespace

const char* name(Algorithm algorithm) {
  constexpr const char* names[] = {"flat", "arena", "staged", "parts", "device"};
  return names[static_cast<size_t>(algorithm)];
}

std::string describe(const Call& call, uint64_t sequence) {
  std::string out = name(call.operation);
  if (sequence > 0) out += text(" #%llu", static_cast<unsigned long long>(sequence));
  const bool parts = takes_parts(call.operation);  // of sizes that differ from rank to rank
  if (call.operation != Operation::barrier)
    out += std::string(call.device == DeviceType::cuda ? " of CUDA " : " of ") + name(call.dtype);
  if (call.operation != Operation::barrier && !parts)
    out += text("[%llu]", static_cast<unsigned long long>(call.elems));
  if (has_reduction(call.operation)) out += text(" (%s)", name(call.reduction));
  if (has_root(call.operation)) {
    const bool from = call.operation == Operation::broadcast || call.operation == Operation::scatter;
    out += text(" %s rank %u", from ? "from" : "to", call.root);
  }
  if (call.wire && *call.wire != call.dtype) out += text(" as %s between hosts", name(*call.wire));
  return out;
}

Step copy_step(Region to, Region from, uint64_t bytes) {
  Step step{Step::Kind::copy};
  step.to = to;
  step.from = from;
  step.bytes = bytes;
  return step;
}

Step reduce_step(std::vector<Region> results, std::vector<Region> sources, uint64_t bytes) {
  Step step{Step::Kind::reduce};
  step.results = std::move(results);
  step.sources = std::move(sources);
  step.bytes = bytes;
  return step;
}

std::vector<Region> of_all(Seat seat, Place place, uint64_t offset_bytes, Region own) {
  std::vector<Region> regions;
  for (uint32_t rank = 0; rank < seat.ranks; ++rank)
    regions.push_back(rank == seat.rank ? own : Region{place, rank, offset_bytes});
  return regions;
}

Step start_copy_step(Region to, Region from, uint64_t bytes) {
  Step step = copy_step(to, from, bytes);
  step.kind = Step::Kind::start_copy;
  return step;
}

Step wait_copied_step(uint64_t copies) {
  Step step{Step::Kind::wait_copied};
  step.value = copies;
  return step;
}

Step wait_room_step(uint64_t result, uint32_t rank) {
  Step step{Step::Kind::wait_room, Counter::returned, rank};
  step.value = result;
  return step;
}

Step let_go_step(uint64_t result) {
  Step step{Step::Kind::let_go};
  step.value = result;
  return step;
}

Step advance_step(Counter counter, uint64_t value) {
  Step step{Step::Kind::advance, counter};
  step.value = value;
  return step;
}

Step wait_step(Counter counter, uint64_t value, uint32_t rank) {
  Step step{Step::Kind::wait, counter, rank};
  step.value = value;
  return step;
}

Step send_step(uint32_t rank, Region from, uint64_t bytes) {
  Step step{Step::Kind::send, Counter::posted, rank};
  step.from = from;
  step.bytes = bytes;
  return step;
}

Step receive_step(uint32_t rank, Region to, uint64_t bytes) {
  Step step{Step::Kind::receive, Counter::posted, rank};
  step.to = to;
  step.bytes = bytes;
  return step;
}

Step wait_sent_step(uint32_t rank, uint64_t frames) {
  Step step{Step::Kind::wait_sent, Counter::posted, rank};
  step.value = frames;
  return step;
}

Step wait_received_step(uint32_t rank, uint64_t frames) {
  Step step{Step::Kind::wait_received, Counter::posted, rank};
  step.value = frames;
  return step;
}

Step tell_step(size_t level) {
  Step step{Step::Kind::tell};
  step.value = level;
  return step;
}

Step hear_step(size_t level) {
  Step step{Step::Kind::hear};
  step.value = level;
  return step;
}

std::string print(const Plan& plan) {
  std::string out = text("%s\n", name(plan.algorithm));
  for (const Step& step : plan.before) out += "  " + print(step) + "\n";
  out += "  meet\n";
  for (const Step& step : plan.after) out += "  " + print(step) + "\n";
  return out;
}

}  // namespace photinus
