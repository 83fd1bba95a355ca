#include "peers/process_page.h"

namespace photinus {

uint64_t WaitRecord::write(const Facts& facts) {
  version_.fetch_add(1, std::memory_order_seq_cst);
  lane_.store(facts.lane, std::memory_order_seq_cst);
  for (size_t i = 0; i < kProcesses; ++i)
    waits_for_[i].store(i < facts.waits_for.size() ? facts.waits_for[i] : 0, std::memory_order_seq_cst);
  text_.write(facts.text);
  return version_.fetch_add(1, std::memory_order_seq_cst) + 1;
}

void WaitRecord::clear() {
  if (lane_.load(std::memory_order_relaxed) == 0) return;
  version_.fetch_add(1, std::memory_order_seq_cst);
  lane_.store(0, std::memory_order_seq_cst);
  version_.fetch_add(1, std::memory_order_seq_cst);
}

void WaitRecord::set_deadlocked(const std::vector<Wait>& waits) {
  for (size_t i = 0; i < kProcesses; ++i) {
    deadlocked_[i].version.store(0, std::memory_order_seq_cst);
    if (i >= waits.size()) continue;
    deadlocked_[i].process.store(waits[i].process, std::memory_order_seq_cst);
    deadlocked_[i].version.store(waits[i].version, std::memory_order_seq_cst);
  }
}

std::vector<WaitRecord::Wait> WaitRecord::deadlocked() const {
  std::vector<Wait> waits;
  for (const Deadlocked& entry : deadlocked_) {
    const Wait wait{entry.process.load(std::memory_order_seq_cst),
                    entry.version.load(std::memory_order_seq_cst)};
    if (wait.version != 0 && entry.process.load(std::memory_order_seq_cst) == wait.process)
      waits.push_back(wait);
  }
  return waits;
}

void WaitRecord::mirror(const Facts& facts) {
  write(facts);
  affirmed_.store(facts.affirmed, std::memory_order_seq_cst);
  version_.store(facts.version, std::memory_order_seq_cst);
}

std::optional<WaitRecord::Facts> WaitRecord::read() const {
  Facts facts;
  facts.version = version_.load(std::memory_order_seq_cst);
  facts.lane = lane_.load(std::memory_order_seq_cst);
  facts.affirmed = affirmed_.load(std::memory_order_seq_cst);
  if (facts.version % 2 || facts.lane == 0) return std::nullopt;
  for (const auto& process : waits_for_)
    if (uint64_t id = process.load(std::memory_order_seq_cst)) facts.waits_for.push_back(id);
  facts.text = text_.read();
  if (version_.load(std::memory_order_seq_cst) != facts.version) return std::nullopt;
  return facts;
}

}  // namespace photinus
