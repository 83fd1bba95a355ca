// How a user's Ctrl-C ends the engine's waits. What embeds the engine, as an interpreter does, knows whether
// a signal wants the calling thread back; waits ask it at least every tenth of a second.
#pragma once

#include <string>

namespace photinus {

// For all waits of this process; to be set before they begin. Without: none is ever interrupted.
void set_interrupt_check(bool (*is_interrupted)());
bool is_interrupted();
// Throws Error(interrupted) when the calling thread is wanted back from what it waits for.
void check_interrupt(const std::string& waiting_for);

}  // namespace photinus
