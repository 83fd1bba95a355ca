// How long collectives would take on hosts that are not here: the engine's plans, run on a model.
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <random>
#include <sstream>

#include "base/error.h"
#include "simulate/parameters.h"
#include "simulate/simulation.h"

using namespace photinus;
using namespace photinus::simulate;

namespace {

constexpr const char* kUsage =
    R"(simulate HOSTS SIZE... [options]   how long an all_reduce takes, by a model of hosts and network

  HOSTS             hosts x ranks, like 180x8, or the ranks of each, like 3+1
  SIZE              of a rank's tensor, like 4KiB or 186MiB

  --levels LIST     like 4,45; "all" for every sensible one; more than once; default: what the engine takes
  --operation NAME  all_reduce (default), reduce_scatter, all_gather, reduce, broadcast, barrier
  --dtype NAME      float32 (default), bfloat16, ...
  --memory PLACE    of tensors: arena (default) or ordinary
  --calls N         back to back; the time is their mean (default 1)
  --fold            simulate one host, and take all others to do the same at the same time: for alike hosts
  --sums N          check the sums of N elements, and those at both ends: each rank once, in the tree's order
  --formulas        the same, a ring and a double binary tree by formula too
  --slots-bytes N, --slice-bytes N, --landing-bytes N    memory for chunks (default: the engine's)
  --json            one line for each simulation
  --model FILE      lines of a parameter and a value
)";

[[noreturn]] void wrong(const std::string& what) {
  throw Error(ErrorKind::invalid_argument, what + " (--help says what there is)");
}

uint64_t number(const std::string& word) {
  char* end = nullptr;
  const uint64_t value = std::strtoull(word.c_str(), &end, 10);
  if (word.empty() || *end || word[0] == '-') wrong("'" + word + "' is no number");
  return value;
}

uint64_t bytes(const std::string& word) {
  const std::pair<const char*, uint64_t> units[] = {
      {"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"B", 1}};
  for (const auto& [unit, value] : units)
    if (word.ends_with(unit)) return number(word.substr(0, word.size() - std::string(unit).size())) * value;
  return number(word);
}

std::vector<uint32_t> list(const std::string& words, char between) {
  std::vector<uint32_t> values;
  std::istringstream in(words);
  for (std::string word; std::getline(in, word, between);)
    values.push_back(static_cast<uint32_t>(number(word)));
  if (values.empty()) wrong("'" + words + "' is no list");
  return values;
}

std::vector<std::vector<uint32_t>> hosts(const std::string& words) {
  std::vector<uint32_t> counts;
  if (const size_t x = words.find('x'); x != std::string::npos)
    counts.assign(number(words.substr(0, x)), static_cast<uint32_t>(number(words.substr(x + 1))));
  else
    counts = list(words, '+');
  std::vector<std::vector<uint32_t>> all;
  uint32_t rank = 0;
  for (uint32_t count : counts) {
    all.emplace_back();
    while (count-- > 0) all.back().push_back(rank++);
  }
  if (all.empty()) wrong("there must be a host");
  return all;
}

// Direct exchange; by halves, by fours, by eights, by sixteens; two levels that are as equal as can be.
std::vector<std::vector<uint32_t>> all_lists(uint32_t count) {
  std::vector<std::vector<uint32_t>> lists{choose_levels(count)};
  auto add = [&](const std::vector<uint32_t>& sizes) {
    if (std::find(lists.begin(), lists.end(), sizes) == lists.end()) lists.push_back(sizes);
  };
  add({count});
  for (const uint32_t by : {2u, 4u, 8u, 16u}) {
    std::vector<uint32_t> sizes;
    uint32_t rest = count;
    for (; rest % by == 0 && rest > by; rest /= by) sizes.push_back(by);
    sizes.push_back(rest);
    add(sizes);
  }
  std::optional<std::vector<uint32_t>> two;
  for (uint32_t first = 2; count % first == 0 && first < count; first *= 2)
    if (!two || first + count / first < (*two)[0] + (*two)[1]) two = {first, count / first};
  if (two) add(*two);
  return lists;
}

template <typename Value, size_t count>
Value named(const std::string& word, const Value (&values)[count]) {
  std::string known;
  for (const Value value : values) {
    if (word == name(value)) return value;
    known += std::string(known.empty() ? "" : ", ") + name(value);
  }
  wrong("'" + word + "' is none of " + known);
}

struct Asked {
  Setup setup;
  std::vector<uint64_t> sizes;
  std::vector<std::vector<uint32_t>> lists;
  uint64_t sums = 0;
  bool checks_sums = false, json = false, formulas = false;
  std::string hosts;
};

Asked parse(const std::vector<std::string>& words) {
  Asked asked;
  Setup& s = asked.setup;
  s.call.operation = Operation::all_reduce;
  std::vector<std::string> lists;
  std::optional<uint64_t> slots_bytes;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    auto value = [&]() -> const std::string& {
      if (i + 1 == words.size()) wrong(word + " needs a value");
      return words[++i];
    };
    if (!word.starts_with("--")) {
      if (asked.hosts.empty())
        asked.hosts = word;
      else
        asked.sizes.push_back(bytes(word));
    } else if (word == "--levels") {
      lists.push_back(value());
    } else if (word == "--operation") {
      s.call.operation =
          named(value(), {Operation::all_reduce, Operation::reduce_scatter, Operation::all_gather,
                          Operation::reduce, Operation::broadcast, Operation::barrier});
    } else if (word == "--dtype") {
      s.call.dtype = named(value(), {Dtype::float32, Dtype::float64, Dtype::bfloat16, Dtype::float16});
    } else if (word == "--memory") {
      const std::string& place = value();
      if (place != "arena" && place != "ordinary") wrong("--memory is arena or ordinary");
      s.in_arenas = place == "arena";
    } else if (word == "--calls") {
      s.calls = static_cast<uint32_t>(number(value()));
    } else if (word == "--fold") {
      s.folded = true;
    } else if (word == "--sums") {
      asked.sums = number(value());
      asked.checks_sums = true;
    } else if (word == "--formulas") {
      asked.formulas = true;
    } else if (word == "--slots-bytes") {
      slots_bytes = bytes(value());
    } else if (word == "--slice-bytes") {
      s.net.slice_bytes = bytes(value());
    } else if (word == "--landing-bytes") {
      s.net.landing_bytes = bytes(value());
    } else if (word == "--json") {
      asked.json = true;
    } else if (word == "--model") {
      read(s.model, value());
    } else if (!set(s.model, word.substr(2), i + 1 < words.size() ? words[i + 1] : "")) {
      wrong("there is no option " + word);
    } else {
      ++i;
    }
  }
  if (asked.sizes.empty()) wrong("hosts and sizes must be given");
  s.levels.hosts = hosts(asked.hosts);
  const auto count = static_cast<uint32_t>(s.levels.hosts.size());
  s.slots = sizes_for({}, s.levels.ranks(), count > 1);
  if (slots_bytes) s.slots.chunk_bytes = *slots_bytes / s.slots.chunks;
  if (lists.empty()) asked.lists = {choose_levels(count)};
  for (const std::string& words_of : lists)
    if (words_of == "all")
      for (const auto& each : all_lists(count)) asked.lists.push_back(each);
    else
      asked.lists.push_back(list(words_of, ','));
  return asked;
}

// Those at both ends, and some between.
std::vector<uint64_t> some_elements(uint64_t elems, uint64_t count) {
  std::vector<uint64_t> elements{0, elems - 1};
  std::mt19937_64 random(1);
  while (count-- > 0) elements.push_back(random() % elems);
  std::sort(elements.begin(), elements.end());
  elements.erase(std::unique(elements.begin(), elements.end()), elements.end());
  return elements;
}

void print_json(const Asked& asked, const Setup& s, uint64_t size, const Outcome& o, double took_s) {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::printf(
      "{\"hosts\": \"%s\", \"bytes\": %llu, \"levels\": [%s], \"algorithm\": \"%s\", \"seconds\": %.9g, "
      "\"sent\": %.0f, \"received\": %.0f, \"least\": %.0f, \"cards\": %.4f, \"cores\": %.4f, \"switches\": "
      "%.4f, \"binds\": \"%s\", \"frames\": %llu, \"steps\": %llu, \"sums\": %llu, \"took_s\": %.3f, "
      "\"peak_bytes\": %llu}\n",
      asked.hosts.c_str(), static_cast<unsigned long long>(size), print(s.levels.sizes).c_str(),
      name(o.algorithm), o.seconds, o.sent_bytes, o.received_bytes, o.least_bytes,
      std::max(o.card_out, o.card_in), o.core, o.switches, o.binds().c_str(),
      static_cast<unsigned long long>(o.frames), static_cast<unsigned long long>(o.steps),
      static_cast<unsigned long long>(o.sums), took_s,
      static_cast<unsigned long long>(usage.ru_maxrss) * 1024);
}

void print_formula(const char* what, uint64_t size, double seconds) {
  std::printf("  %-18s %10.4g ms %8.3f GB/s\n", what, seconds * 1e3,
              static_cast<double>(size) / seconds * 1e-9);
}

void print_line(const Setup& s, uint64_t size, const Outcome& o) {
  std::string share = "-";
  if (s.call.operation == Operation::all_reduce && o.least_bytes > 0)
    share = text("%.4f out, %.4f in", o.sent_bytes / o.least_bytes, o.received_bytes / o.least_bytes);
  std::printf("  %-11s %-6s %10.4g ms %8.3f GB/s   %s of the bytes   %s%s\n", print(s.levels.sizes).c_str(),
              name(o.algorithm), o.seconds * 1e3, static_cast<double>(size) / o.seconds * 1e-9, share.c_str(),
              o.binds().c_str(),
              o.sums ? text("   %llu sums right", static_cast<unsigned long long>(o.sums)).c_str() : "");
}

void run_all(Asked asked) {
  Setup& s = asked.setup;
  s.net.latency_s = s.model.latency_us * 1e-6;  // both as a group of two hosts would measure them
  s.net.bytes_per_s = 1 / least_s(s.model, 2, 1);
  for (const uint64_t size : asked.sizes) {
    const uint64_t parts =
        s.call.operation == Operation::reduce_scatter || s.call.operation == Operation::all_gather
            ? s.levels.ranks()
            : 1;
    s.call.elems = size / parts / size_bytes(s.call.dtype);
    if (s.call.elems == 0 && s.call.operation != Operation::barrier)
      wrong(text("a tensor of %llu bytes has nothing for every rank", static_cast<unsigned long long>(size)));
    if (asked.checks_sums) s.followed = some_elements(s.call.elems, asked.sums);
    const auto count = static_cast<uint32_t>(s.levels.hosts.size());
    const auto whole = static_cast<double>(size);
    if (!asked.json) {
      std::printf("%s of %llu bytes on %s, %.4g Gbit/s", name(s.call.operation),
                  static_cast<unsigned long long>(size), asked.hosts.c_str(), s.model.rate_gbit);
      if (s.call.operation == Operation::all_reduce && count > 1)
        std::printf("; cards need %.4g ms, %.3f GB/s", least_s(s.model, count, whole) * 1e3,
                    whole / least_s(s.model, count, whole) * 1e-9);
      std::printf("\n");
    }
    for (const auto& sizes : asked.lists) {
      s.levels.sizes = sizes;
      const auto begin = std::chrono::steady_clock::now();
      const Outcome o = run(s);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      if (asked.json)
        print_json(asked, s, size, o, took.count());
      else
        print_line(s, size, o);
      if (asked.formulas && !asked.json)
        print_formula("by formula", size,
                      predicted_s(s.model, s.call, s.levels, o.algorithm, s.slots, s.net));
      std::fflush(stdout);
    }
    if (asked.formulas && !asked.json && count > 1) {
      print_formula("ring, formula", size, ring_s(s.model, count, whole));
      print_formula("trees, formula", size, double_tree_s(s.model, count, whole));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty() || words[0] == "--help") {
    std::printf("%s\nParameters of the model, each an option too:\n", kUsage);
    for (const Parameter& each : parameters())
      std::printf("  --%-17s %s (%g)\n", each.name, each.text, Model{}.*each.value);
    return words.empty() ? 2 : 0;
  }
  try {
    run_all(parse(words));
  } catch (const Error& error) {
    std::fprintf(stderr, "simulate: %s\n", error.what());
    return 1;
  }
}
