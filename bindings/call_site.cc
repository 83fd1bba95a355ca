#include "call_site.h"

#include <Python.h>
#include <frameobject.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <utility>

#ifdef Py_LIMITED_API
// CPython has these since 3.11, though not in its stable ABI. Should one lack them, calls have no line.
#pragma weak PyFrame_GetBack
#pragma weak PyFrame_GetLasti
extern "C" {
PyFrameObject* PyFrame_GetBack(PyFrameObject* frame);
int PyFrame_GetLasti(PyFrameObject* frame);
}
#endif

namespace photinus {
namespace {

// The stable ABI does not know that frames and code are objects.
PyObject* object(auto* frame_or_code) {
  return reinterpret_cast<PyObject*>(frame_or_code);
}

// All of this is guarded by the interpreter's lock, and leaked: calls may come while the interpreter ends.
std::vector<std::string>& folders() {
  static auto* all = new std::vector<std::string>;
  return *all;
}

struct Facts {
  bool is_library = false;
  bool has_named_functions = false;
  const std::string* function = nullptr;  // "photinus.evaluate", where users call it by this name
  bool is_neutral = false;  // ranks come through it from different lines of the program by design
};

std::string& named_folder() {
  static auto* folder = new std::string;
  return *folder;
}

// torch's Join: ranks that have run out of data answer the others' calls from the `with` statement.
constexpr const char* kNeutralFile = "torch/distributed/algorithms/join.py";

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// The last code objects, which are kept so that their addresses stay their own; and no more of them, since
// notebooks make new ones in each cell.
constexpr size_t kKept = 256;
void keep(PyCodeObject*& slot, PyCodeObject* code) {
  Py_INCREF(object(code));
  PyCodeObject* const before = std::exchange(slot, code);
  Py_XDECREF(object(before));
}
size_t slot_of(PyCodeObject* code, int instruction = 0) {
  return (reinterpret_cast<uintptr_t>(code) / 64 + static_cast<unsigned>(instruction)) % kKept;
}

std::string text_of(PyCodeObject* code, const char* attribute) {
  std::string text;
  if (PyObject* value = PyObject_GetAttrString(object(code), attribute)) {
    if (const char* content = PyUnicode_AsUTF8AndSize(value, nullptr)) text = content;
    Py_DECREF(value);
  }
  PyErr_Clear();
  return text;
}

std::string file_of(PyCodeObject* code) {
  return text_of(code, "co_filename");
}

// "photinus.Loop" for Loop._batches, which users do not call; null where nothing of the name is theirs.
// Python 3.10 has no qualified names.
const std::string* function_of(PyCodeObject* code) {
  static auto* known = new std::set<std::string>;
  const std::string name = text_of(code, "co_qualname");
  if (name.empty() || name[0] == '_' || name.find('<') != std::string::npos) return nullptr;
  return &*known->insert("photinus." + name.substr(0, name.find("._"))).first;
}

Facts facts_of(PyCodeObject* code) {
  struct Known {
    PyCodeObject* code = nullptr;
    Facts facts;
  };
  static auto* known = new std::array<Known, kKept>;
  Known& slot = (*known)[slot_of(code)];
  if (slot.code == code) return slot.facts;
  const std::string file = file_of(code);
  Facts facts;
  facts.is_library = std::any_of(folders().begin(), folders().end(),
                                 [&](const std::string& folder) { return file.rfind(folder, 0) == 0; });
  facts.is_neutral = ends_with(file, kNeutralFile);
  facts.has_named_functions = !named_folder().empty() && file.rfind(named_folder(), 0) == 0;
  if (facts.has_named_functions) facts.function = function_of(code);
  slot.facts = facts;
  keep(slot.code, code);
  return facts;
}

// The file's name with its folder, which is the same on hosts where the project lies in different places.
std::string short_name(const std::string& file) {
  const size_t last = file.rfind('/');
  if (last == std::string::npos || last == 0) return file;
  const size_t before = file.rfind('/', last - 1);
  return before == std::string::npos ? file : file.substr(before + 1);
}

// Lives as long as the process: calls in flight point to it.
const CallSite* site_at(PyCodeObject* code, int line, bool votes, const std::string* function) {
  static auto* known = new std::map<std::pair<std::string, bool>, CallSite>;
  std::string place = short_name(file_of(code)) + ":" + std::to_string(line);
  if (function) place += " (" + *function + ")";
  std::pair key{std::move(place), votes};
  auto found = known->find(key);
  if (found == known->end()) {
    CallSite site = CallSite::of(key.first);
    site.votes = votes;
    found = known->emplace(std::move(key), std::move(site)).first;
  }
  return &found->second;
}

// The same of the place where a frame is now. A program calls from few places many times: finding a line
// means reading the code's table of lines from its beginning, so the last places are remembered by
// instruction.
const CallSite* site_of(PyFrameObject* frame, PyCodeObject* code, bool votes, const std::string* function) {
#if PY_VERSION_HEX >= 0x030B0000
  struct Place {
    PyCodeObject* code = nullptr;
    int instruction = 0;
    bool votes = false;
    const std::string* function = nullptr;
    const CallSite* site = nullptr;
  };
  static auto* places = new std::array<Place, kKept>;
  const int instruction = PyFrame_GetLasti(frame);
  Place& place = (*places)[slot_of(code, instruction)];
  if (place.code == code && place.instruction == instruction && place.votes == votes &&
      place.function == function)
    return place.site;
  const CallSite* site = site_at(code, PyFrame_GetLineNumber(frame), votes, function);
  place.instruction = instruction;
  place.votes = votes;
  place.function = function;
  place.site = site;
  keep(place.code, code);
  return site;
#else
  return site_at(code, PyFrame_GetLineNumber(frame), votes, function);
#endif
}

}  // namespace

void set_library_folders(std::vector<std::string> given, std::string named) {
  folders() = std::move(given);
  named_folder() = std::move(named);
}

const CallSite* call_site() {
  PyFrameObject* frame = PyEval_GetFrame();
#ifdef Py_LIMITED_API
  if (!PyFrame_GetBack || !PyFrame_GetLasti) return nullptr;
#endif
  if (!frame) return nullptr;
  PyFrameObject* innermost = frame;
  Py_INCREF(object(innermost));
  Py_INCREF(object(frame));
  const CallSite* site = nullptr;
  const std::string* function = nullptr;
  bool votes = true;
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const Facts facts = facts_of(code);
    votes &= !facts.is_neutral;
    // The outermost one that users call by name, unless another library lies between it and them.
    if (!facts.is_library)
      site = site_of(frame, code, votes, function);
    else if (!facts.has_named_functions)
      function = nullptr;
    else if (facts.function)
      function = facts.function;
    Py_DECREF(object(code));
    PyFrameObject* caller = site ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(object(frame));
    frame = caller;
  }
  // Where every frame is a library's (a hook that C++ calls, a callback), the innermost one must do, without
  // a vote: such calls come from wherever there was time.
  if (!site) {
    PyCodeObject* code = PyFrame_GetCode(innermost);
    site = site_of(innermost, code, false, nullptr);
    Py_DECREF(object(code));
  }
  Py_DECREF(object(innermost));
  return site;
}

}  // namespace photinus
