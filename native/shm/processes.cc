#include "shm/processes.h"

namespace photinus {

void Processes::add(const std::shared_ptr<Segment>& arena, const std::string& name) {
  std::lock_guard lock(mutex_);
  std::erase_if(met_, [](const auto& entry) { return entry.second.arena.expired(); });
  met_.try_emplace(Arena::page_of(*arena).id.load(), Entry{arena, name});
}

std::optional<Processes::Process> Processes::find(uint64_t id) const {
  std::lock_guard lock(mutex_);
  auto found = met_.find(id);
  if (found == met_.end()) return std::nullopt;
  std::shared_ptr<Segment> arena = found->second.arena.lock();
  if (!arena) return std::nullopt;
  return Process{std::move(arena), found->second.name};
}

}  // namespace photinus
