// Where in the user's Python program the running call stands: the innermost frame outside of the libraries
// that lie between the user and the engine.
#pragma once

#include <string>
#include <vector>

#include "engine/collective.h"

namespace photinus {

// Folders whose frames are passed over, and the one among them whose functions messages name, each ending
// with a slash. Replaces the earlier ones.
void set_library_folders(std::vector<std::string> folders, std::string named);

// The place of the call, or null when no Python runs. Needs the interpreter's lock. Costs about a
// microsecond: code objects are looked at once.
const CallSite* call_site();

}  // namespace photinus
