#include "peers/processes.h"

namespace photinus {

void Processes::add(const std::shared_ptr<ProcessPage>& page, const std::string& name) {
  std::lock_guard lock(mutex_);
  std::erase_if(met_, [](const auto& entry) { return entry.second.page.expired(); });
  met_.try_emplace(page->id.load(), Entry{page, name});
}

std::optional<Processes::Process> Processes::find(uint64_t id) const {
  std::lock_guard lock(mutex_);
  auto found = met_.find(id);
  if (found == met_.end()) return std::nullopt;
  std::shared_ptr<ProcessPage> page = found->second.page.lock();
  if (!page) return std::nullopt;
  return Process{std::move(page), found->second.name};
}

}  // namespace photinus
