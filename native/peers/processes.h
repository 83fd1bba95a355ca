// The processes that this one has met, in whichever group: a search that follows waits from process to
// process does not end at the border of a group.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "peers/process_page.h"

namespace photinus {

class Processes {
 public:
  struct Process {
    std::shared_ptr<ProcessPage> page;
    std::string name;  // "rank 2 (pid 71 on host-b)", by its rank in the group in which it was met first
  };

  // They are forgotten when no group holds their page any more.
  void add(const std::shared_ptr<ProcessPage>& page, const std::string& name);
  std::optional<Process> find(uint64_t id) const;

 private:
  struct Entry {
    std::weak_ptr<ProcessPage> page;
    std::string name;
  };
  mutable std::mutex mutex_;
  std::map<uint64_t, Entry> met_;  // by id
};

}  // namespace photinus
