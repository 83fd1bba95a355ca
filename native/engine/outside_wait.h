// A wait for ranks of a group by other means than an operation of it, as for ranks that are to join a further
// group: it ends like a wait of an operation when one of them has gone, the ranks wait for each other, or its
// deadline passes, and says meanwhile for whom it waits.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/group.h"
#include "engine/watchdog.h"

namespace photinus {

class OutsideWait {
 public:
  // `key`: what is waited for, the same text on all ranks that wait for the same.
  OutsideWait(std::shared_ptr<Group> group, std::shared_ptr<Watchdog> watchdog, const std::string& key,
              double timeout_s);
  ~OutsideWait();
  OutsideWait(const OutsideWait&) = delete;
  OutsideWait& operator=(const OutsideWait&) = delete;

  // To be called now and then by the thread that waits, with the ranks that have not come. Throws to end it.
  void look(const std::vector<uint32_t>& missing, const std::string& description);

 private:
  std::shared_ptr<Group> group_;
  std::shared_ptr<Watchdog> watchdog_;
  uint64_t lane_;
  WaitState wait_;
};

}  // namespace photinus
