#include "outside_wait.h"

#include <algorithm>

#include "collective.h"

namespace photinus {

OutsideWait::OutsideWait(std::shared_ptr<Group> group, std::shared_ptr<Lookout> lookout,
                         const std::string& key, double timeout_s)
    : group_(std::move(group)),
      lookout_(std::move(lookout)),
      lane_(uint64_t{CallSite::of(key).hash} << 32 | 1),
      vigil_(timeout_s) {}

OutsideWait::~OutsideWait() {
  Stuck& stuck = group_->page(group_->rank()).stuck;
  if (stuck.version() == vigil_.published_version) stuck.clear();  // not what another wait shows by now
}

void OutsideWait::look(const std::vector<uint32_t>& missing, const std::string& description) {
  if (std::any_of(missing.begin(), missing.end(), [&](uint32_t rank) { return rank >= group_->ranks(); }))
    throw Error(ErrorKind::invalid_argument, "a rank to wait for is none of group " + group_->options.name);
  try {
    lookout_->look(
        vigil_, [&] { return missing; }, description, lane_,
        group_->options.progress->is_idle_but_for_this_thread());
  } catch (const PeerLost&) {
    group_->ended_with(std::current_exception());
    throw;
  } catch (const Deadlock&) {
    group_->ended_with(std::current_exception());
    throw;
  }
}

}  // namespace photinus
