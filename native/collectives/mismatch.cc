#include "collectives/mismatch.h"

#include <algorithm>
#include <set>

#include "base/error.h"

namespace photinus {
namespace {

// "ranks 0-7, 9": four in a row or more are said as a range.
std::string list_of(const RankSet& set) {
  const std::vector<uint32_t> ranks = set.list();
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0, end; i < ranks.size(); i = end) {
    end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i < 4) end = i + 1;
    out += text(i ? ", %u" : "%u", ranks[i]);
    if (end - i > 1) out += text("-%u", ranks[end - 1]);
  }
  return out;
}

// Where a site names the function that the user called: "train.py:41 (photinus.evaluate)"; npos where it does
// not.
size_t function_begin(const std::string& site) {
  return site.rfind(" (photinus.");
}

std::string function_of(const PostedCall& call) {
  const size_t begin = function_begin(call.site);
  return begin == std::string::npos ? "" : call.site.substr(begin + 2, call.site.size() - begin - 3);
}

// "photinus.evaluate at train.py:41 (all_gather of int64[1])"
std::string describe_function(const PostedCall& posted) {
  const std::string function = function_of(posted);
  if (function.empty()) return describe(posted);
  PostedCall inner = posted;
  inner.site.clear();
  return function + " at " + posted.site.substr(0, function_begin(posted.site)) + " (" + describe(inner) +
         ")";
}

// Of calls that look alike, one with all their ranks.
std::vector<PostedCall> distinct(const std::vector<PostedCall>& calls) {
  std::vector<PostedCall> sets;
  for (const PostedCall& call : calls) {
    auto same = std::find_if(sets.begin(), sets.end(), [&](const PostedCall& other) {
      return agree(other.facts, call.facts) && other.facts.elems == call.facts.elems &&
             other.facts.shape == call.facts.shape && other.site == call.site;
    });
    if (same == sets.end())
      sets.push_back(call);
    else
      same->ranks.insert(call.ranks);
  }
  return sets;
}

// The same whoever called from which of them.
uint64_t set_of_sites(const std::vector<CallDescriptor>& calls) {
  uint64_t sites = 0;
  for (const CallDescriptor& call : calls) sites += call.site * 0x9e3779b97f4a7c15;
  return sites;
}

}  // namespace

std::string describe(const PostedCall& posted) {
  const CallDescriptor& d = posted.facts;
  std::string out = describe(Call{d.operation, d.dtype, d.reduction, d.root, d.elems, d.wire, d.device});
  if (!posted.shape.empty() && posted.shape != text("[%llu]", static_cast<unsigned long long>(d.elems)))
    out += " of shape " + posted.shape;
  if (!posted.label.empty()) out += " labelled '" + posted.label + "'";
  if (!posted.site.empty()) out += " at " + posted.site;
  if (d.strict_sites) out += " with PHOTINUS_STRICT_SITES=1";
  return out;
}

bool agree(const CallDescriptor& a, const CallDescriptor& b) {
  return a.operation == b.operation && a.dtype == b.dtype && a.device == b.device && a.wire == b.wire &&
         a.reduction == b.reduction && a.root == b.root && a.has_parts == b.has_parts &&
         a.strict_sites == b.strict_sites && (a.has_parts || a.elems == b.elems) && a.label == b.label;
}

bool agree(const std::vector<CallDescriptor>& calls) {
  const bool by_root = follows_root(calls[0]);
  uint64_t shape = calls[by_root ? calls[0].root : 0].shape;
  for (const CallDescriptor& call : calls) {
    if (!agree(calls[0], call)) return false;
    if (shape && call.shape && call.shape != shape) return false;
    if (!by_root) shape |= call.shape;
  }
  return true;
}

bool follows_root(const CallDescriptor& call) {
  return call.has_parts && has_root(call.operation);
}

std::string mismatch_text(const std::string& group, uint64_t sequence, const std::vector<PostedCall>& calls,
                          const RankSet& others) {
  std::set<std::string> functions;
  for (const PostedCall& call : calls) functions.insert(function_of(call));
  const bool by_function = functions.size() > 1;
  std::string out =
      text("the ranks of group %s called different %s as #%llu:", group.c_str(),
           by_function ? "functions" : "collectives", static_cast<unsigned long long>(sequence));
  for (const PostedCall& call : distinct(calls))
    out += " " + list_of(call.ranks) + " called " + (by_function ? describe_function(call) : describe(call)) +
           ";";
  if (!others.is_empty()) out += " " + list_of(others) + " called still others;";
  out += " no output was written. ";
  if (by_function)
    return out +
           "Every rank must call the same functions, in the same order: move a call that only some ranks "
           "reach "
           "(such as one below `if is_main:`) to where all ranks do.";
  return out +
         "Every rank must call the same collectives, in the same order, on tensors of the same shape and "
         "type, "
         "all on CPUs or all on GPUs.";
}

std::string out_of_step_text(const std::string& group, uint64_t sequence,
                             const std::vector<PostedCall>& calls) {
  return mismatch_text(group, sequence, calls) +
         " (The calls look alike, but all ranks have called from each of these lines together before, or "
         "have just "
         "swapped them: the ranks are out of step.)";
}

std::string suspicion_text(const std::string& group, uint64_t sequence,
                           const std::vector<PostedCall>& calls) {
  std::string out = text("ranks may be out of step in group %s: as #%llu", group.c_str(),
                         static_cast<unsigned long long>(sequence));
  for (const PostedCall& call : distinct(calls))
    out += ", " + list_of(call.ranks) + " called " + describe(call);
  return out +
         ". All ranks have called from each of these lines together before, or have just swapped them. If "
         "this "
         "program does not mean that, a call was skipped or swapped, and results are wrong; "
         "PHOTINUS_STRICT_SITES=1 makes it an error. Said once.";
}

bool SiteHistory::look_out_of_step(const std::vector<CallDescriptor>& calls, bool every_time) {
  const uint32_t first = calls[0].site;
  bool equal = true, silent = false;
  for (const CallDescriptor& call : calls) {
    silent |= call.site == 0;  // says nothing
    equal &= call.site == first;
  }
  if (equal || silent) {
    if (!apart_.empty()) apart_.clear();
    if (silent) return false;
    if (first != last_ && together_.size() < kKept) together_.insert(first);
    last_ = first;
    return false;
  }
  const bool suspicious = all_together_before(calls) || swapped_since_last(calls);
  apart_ = calls;
  if (!suspicious) return false;
  return every_time || (told_.size() < kKept && told_.insert(set_of_sites(calls)).second);
}

bool SiteHistory::all_together_before(const std::vector<CallDescriptor>& calls) const {
  return std::all_of(calls.begin(), calls.end(),
                     [&](const CallDescriptor& call) { return together_.count(call.site) > 0; });
}

// A rank that is the root often has a line of its own, and the next root too: that is no swap.
bool SiteHistory::swapped_since_last(const std::vector<CallDescriptor>& calls) const {
  if (apart_.empty() || apart_[0].operation != calls[0].operation || apart_[0].root != calls[0].root ||
      set_of_sites(apart_) != set_of_sites(calls))
    return false;
  for (size_t rank = 0; rank < calls.size(); ++rank)
    if (apart_[rank].site == calls[rank].site) return false;
  return true;
}

}  // namespace photinus
