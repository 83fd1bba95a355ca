// A model's costs (collectives/cost.h) by name: from options, and from files.
#pragma once

#include <string>
#include <vector>

#include "collectives/cost.h"

namespace photinus::simulate {

struct Parameter {
  const char* name;
  double Model::* value;
  const char* text;
};
const std::vector<Parameter>& parameters();

// False where there is no such parameter. Throws Error(invalid_argument) for a value that cannot be.
bool set(Model& model, const std::string& name, const std::string& value);
// Lines of a name and a value; # begins a comment. Throws Error(invalid_argument).
void read(Model& model, const std::string& file);

}  // namespace photinus::simulate
