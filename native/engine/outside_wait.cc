#include "engine/outside_wait.h"

#include <algorithm>

#include "engine/collective.h"

namespace photinus {

OutsideWait::OutsideWait(std::shared_ptr<Group> group, std::shared_ptr<Watchdog> watchdog,
                         const std::string& key, double timeout_s)
    : group_(std::move(group)),
      watchdog_(std::move(watchdog)),
      lane_(uint64_t{CallSite::of(key).hash} << 32 | 1),
      wait_(now_s(), timeout_s) {}

OutsideWait::~OutsideWait() {
  WaitRecord& record = group_->peers->own().page->wait_record;
  if (record.version() == wait_.published_version) record.clear();  // not what another wait shows by now
}

void OutsideWait::look(const std::vector<uint32_t>& missing, const std::string& description) {
  if (std::any_of(missing.begin(), missing.end(), [&](uint32_t rank) { return rank >= group_->ranks(); }))
    throw Error(ErrorKind::invalid_argument, "a rank to wait for is none of group " + group_->options.name);
  try {
    watchdog_->look(
        wait_, [&] { return missing; }, [&] { return description; }, lane_,
        group_->options.progress->is_idle_but_for_this_thread(wait_.deadline.elapsed_s()));
  } catch (const PeerLost&) {
    group_->keep_error();
    throw;
  } catch (const Deadlock&) {
    group_->keep_error();
    throw;
  }
}

}  // namespace photinus
