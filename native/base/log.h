// Lines for the user that are no errors: something takes long, a peer looks dead.
#pragma once

#include <functional>
#include <string>

namespace photinus {

// Writes "photinus: " and the line to standard error in one piece; never throws.
void say(const std::string& line);

// Sends later lines elsewhere; an empty function brings standard error back.
void set_listener(std::function<void(const std::string& line)> listener);

}  // namespace photinus
