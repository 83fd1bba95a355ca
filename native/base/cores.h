// How many cores this process may use, as its affinity and its control group say; the machine's count
// misleads.
#pragma once

namespace photinus {

// At least 1. Reads the affinity mask and cpu.max (or cpu.cfs_quota_us) of the control group.
int usable_cores();

}  // namespace photinus
