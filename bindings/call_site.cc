#include "call_site.h"

#include <Python.h>
#include <frameobject.h>

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace photinus {
namespace {

// All of this is guarded by the interpreter's lock, and leaked: calls may come while the interpreter ends.
std::vector<std::string>& folders() {
  static auto* all = new std::vector<std::string>;
  return *all;
}

struct Code {
  std::string file;
  bool is_library = false;
  bool is_neutral = false;  // ranks come through it from different lines of the program by design
};

// torch's Join: ranks that have run out of data answer the others' calls from the `with` statement.
constexpr const char* kNeutralFile = "torch/distributed/algorithms/join.py";

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// A code object that was looked at is kept, so that its address stays its own.
const Code& facts_of(PyCodeObject* code) {
  static auto* known = new std::unordered_map<PyCodeObject*, Code>;
  auto found = known->find(code);
  if (found != known->end()) return found->second;
  Code facts;
  if (PyObject* name = PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), "co_filename")) {
    if (const char* text = PyUnicode_AsUTF8(name)) facts.file = text;
    Py_DECREF(name);
  }
  PyErr_Clear();
  facts.is_library = std::any_of(folders().begin(), folders().end(), [&](const std::string& folder) {
    return facts.file.compare(0, folder.size(), folder) == 0;
  });
  facts.is_neutral = ends_with(facts.file, kNeutralFile);
  Py_INCREF(code);
  return known->emplace(code, std::move(facts)).first->second;
}

// The file's name with its folder, which is the same on hosts where the project lies in different places.
std::string short_name(const std::string& file) {
  const size_t last = file.rfind('/');
  if (last == std::string::npos || last == 0) return file;
  const size_t before = file.rfind('/', last - 1);
  return before == std::string::npos ? file : file.substr(before + 1);
}

const CallSite* site_at(PyCodeObject* code, int line, bool votes) {
  static auto* known = new std::map<std::tuple<PyCodeObject*, int, bool>, CallSite>;
  auto found = known->find({code, line, votes});
  if (found == known->end()) {
    CallSite site = CallSite::of(short_name(facts_of(code).file) + ":" + std::to_string(line));
    site.votes = votes;
    found = known->emplace(std::tuple{code, line, votes}, std::move(site)).first;
  }
  return &found->second;
}

// The same of the place where a frame is now. A program calls from few places many times: finding a line
// means reading the code's table of lines from its beginning, so the last places are remembered by
// instruction.
const CallSite* site_of(PyFrameObject* frame, PyCodeObject* code, bool votes) {
#if PY_VERSION_HEX >= 0x030B0000
  struct Place {
    PyCodeObject* code = nullptr;
    int instruction = 0;
    bool votes = false;
    const CallSite* site = nullptr;
  };
  static auto* places = new std::array<Place, 256>;
  const int instruction = PyFrame_GetLasti(frame);
  Place& place =
      (*places)[(reinterpret_cast<uintptr_t>(code) / 64 + static_cast<unsigned>(instruction)) % 256];
  if (place.code != code || place.instruction != instruction || place.votes != votes)
    place = {code, instruction, votes, site_at(code, PyFrame_GetLineNumber(frame), votes)};
  return place.site;
#else
  return site_at(code, PyFrame_GetLineNumber(frame), votes);
#endif
}

}  // namespace

void set_library_folders(std::vector<std::string> given) {
  folders() = std::move(given);
}

const CallSite* call_site() {
  PyFrameObject* frame = PyEval_GetFrame();
  if (!frame) return nullptr;
  PyFrameObject* innermost = frame;
  Py_INCREF(innermost);
  Py_INCREF(frame);
  const CallSite* site = nullptr;
  bool votes = true;
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const Code& facts = facts_of(code);
    votes &= !facts.is_neutral;
    if (!facts.is_library) site = site_of(frame, code, votes);
    Py_DECREF(code);
    PyFrameObject* caller = site ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  // Where every frame is a library's (a hook that C++ calls, a callback), the innermost one must do, without
  // a vote: such calls come from wherever there was time.
  if (!site) {
    PyCodeObject* code = PyFrame_GetCode(innermost);
    site = site_of(innermost, code, false);
    Py_DECREF(code);
  }
  Py_DECREF(innermost);
  return site;
}

}  // namespace photinus
