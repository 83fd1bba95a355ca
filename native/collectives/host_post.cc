#include "collectives/host_post.h"

#include <algorithm>
#include <cstring>

namespace photinus {
namespace {

constexpr size_t kTextLimit = RankBlock::kTextBytes - 1;

// What of a call travels, as it lies in memory: both ends have the same byte order.
struct CallBytes {
  uint64_t elems, label, shape;
  uint32_t root, site;
  uint8_t operation, dtype, reduction, has_parts, wire, device, strict_sites, unused;
};
struct PostBytes {
  uint64_t sequence, parts_sum;
  int32_t least, most;
  uint8_t told, has_all_sites, calls, unused[5];
};
static_assert(sizeof(CallBytes) == 40 && sizeof(PostBytes) == 32, "no bytes between");
static_assert(sizeof(PostBytes) + (2 + sizeof(RankSet::Words)) +
                      HostPost::kMostCalls * (sizeof(CallBytes) + 2 + sizeof(RankSet::Words) +
                                              2 * (1 + kTextLimit) + RankBlock::kShapeBytes) <=
                  HostPost::kMostBytes,
              "the largest post fits");

// The call among those of a post to which one belongs, a new one when there is room; null: it is left out.
PostedCall* find_place(HostPost& post, const CallDescriptor& facts) {
  for (PostedCall& call : post.calls)
    if (agree(call.facts, facts) && call.facts.site == facts.site && call.facts.shape == facts.shape)
      return &call;
  if (post.calls.size() < HostPost::kMostCalls) {
    post.calls.emplace_back().facts = facts;
    return &post.calls.back();
  }
  for (PostedCall& call : post.calls)
    if (agree(call.facts, facts) && (facts.has_parts || call.facts.shape == facts.shape)) {
      post.has_all_sites = false;
      return &call;
    }
  return nullptr;
}

class Writer {
 public:
  explicit Writer(std::byte* to) : begin_(to), to_(to) {}
  void put(const void* data, size_t bytes) {
    std::memcpy(to_, data, bytes);
    to_ += bytes;
  }
  void put(const std::string& text) {
    const auto length = static_cast<uint8_t>(std::min(text.size(), kTextLimit));
    put(&length, 1);
    put(text.data(), length);
  }
  // From the first word that is not zero to the last.
  void put(const RankSet& ranks) {
    size_t first = 0, end = ranks.words.size();
    while (end > 0 && ranks.words[end - 1] == 0) --end;
    while (first < end && ranks.words[first] == 0) ++first;
    const uint8_t range[] = {static_cast<uint8_t>(first), static_cast<uint8_t>(end - first)};
    put(range, sizeof range);
    put(ranks.words.data() + first, (end - first) * sizeof(uint64_t));
  }
  size_t written() const { return static_cast<size_t>(to_ - begin_); }

 private:
  std::byte *begin_, *to_;
};

// Each get says whether there was what it takes.
class Reader {
 public:
  Reader(const std::byte* from, size_t bytes) : from_(from), left_(bytes) {}
  bool get(void* data, size_t bytes) {
    if (bytes > left_) return false;
    std::memcpy(data, from_, bytes);
    from_ += bytes;
    left_ -= bytes;
    return true;
  }
  bool get(std::string& text) {
    uint8_t length;
    if (!get(&length, 1)) return false;
    text.resize(length);
    return get(text.data(), length);
  }
  bool get(RankSet& ranks) {
    uint8_t range[2];
    if (!get(range, sizeof range) || size_t{range[0]} + range[1] > ranks.words.size()) return false;
    return get(ranks.words.data() + range[0], range[1] * sizeof(uint64_t));
  }
  bool is_at_end() const { return left_ == 0; }

 private:
  const std::byte* from_;
  size_t left_;
};

}  // namespace

RankSet HostPost::ranks() const {
  RankSet all = left_out;
  for (const PostedCall& call : calls) all.insert(call.ranks);
  return all;
}

void add(HostPost& post, const CallDescriptor& facts, const char* site, const char* label, uint32_t rank,
         const char* shape) {
  post.updates.add(facts.updates);
  PostedCall* call = find_place(post, facts);
  if (!call) return post.left_out.insert(rank);
  if (call->ranks.is_empty()) {
    call->site = site;
    call->label = label;
    if (facts.shape) call->shape = shape;
  }
  call->ranks.insert(rank);
}

void merge(HostPost& post, const HostPost& heard) {
  if (post.ranks().meets(heard.ranks())) return;
  for (const PostedCall& told : heard.calls) {
    PostedCall* call = find_place(post, told.facts);
    if (!call)
      post.left_out.insert(told.ranks);
    else if (call->ranks.is_empty())
      *call = told;
    else
      call->ranks.insert(told.ranks);
  }
  post.left_out.insert(heard.left_out);
  post.has_all_sites &= heard.has_all_sites;
  post.updates.merge(heard.updates);
  post.parts_sum += heard.parts_sum;
}

bool agrees(const HostPost& post) {
  const CallDescriptor& first = post.calls[0].facts;
  const bool by_root = follows_root(first);
  uint64_t shape = 0;
  for (const PostedCall& call : post.calls)
    if (!by_root || call.ranks.has(first.root)) shape = shape ? shape : call.facts.shape;
  return post.left_out.is_empty() && std::all_of(post.calls.begin(), post.calls.end(), [&](const auto& call) {
           return agree(call.facts, first) && (!shape || !call.facts.shape || call.facts.shape == shape);
         });
}

std::vector<CallDescriptor> calls_by_rank(const HostPost& post) {
  if (!post.has_all_sites || !post.left_out.is_empty()) return {};
  if (post.calls.size() == 1) return {post.calls[0].facts};
  std::vector<CallDescriptor> calls;
  for (uint32_t rank : post.ranks().list())
    calls.push_back(std::find_if(post.calls.begin(), post.calls.end(), [&](const PostedCall& call) {
                      return call.ranks.has(rank);
                    })->facts);
  return calls;
}

size_t encode(const HostPost& post, std::byte* to) {
  Writer writer(to);
  const PostBytes head{post.sequence,
                       post.parts_sum,
                       post.updates.least,
                       post.updates.most,
                       post.updates.told,
                       post.has_all_sites,
                       static_cast<uint8_t>(post.calls.size()),
                       {}};
  writer.put(&head, sizeof head);
  writer.put(post.left_out);
  for (const PostedCall& call : post.calls) {
    const CallDescriptor& d = call.facts;
    const CallBytes facts{d.elems,
                          d.label,
                          d.shape,
                          d.root,
                          d.site,
                          static_cast<uint8_t>(d.operation),
                          static_cast<uint8_t>(d.dtype),
                          static_cast<uint8_t>(d.reduction),
                          d.has_parts,
                          static_cast<uint8_t>(d.wire),
                          static_cast<uint8_t>(d.device),
                          d.strict_sites,
                          {}};
    writer.put(&facts, sizeof facts);
    writer.put(call.ranks);
    writer.put(call.site);
    writer.put(call.label);
    writer.put(call.shape);
  }
  return writer.written();
}

std::optional<HostPost> decode(const std::byte* from, size_t bytes) {
  Reader reader(from, bytes);
  PostBytes head;
  HostPost post;
  if (!reader.get(&head, sizeof head) || !reader.get(post.left_out)) return std::nullopt;
  if (head.calls < 1 || head.calls > HostPost::kMostCalls || head.least < 0 || head.most < 0)
    return std::nullopt;
  post.sequence = head.sequence;
  post.parts_sum = head.parts_sum;
  post.updates = {head.least, head.most, head.told != 0};
  post.has_all_sites = head.has_all_sites != 0;
  post.calls.resize(head.calls);
  for (PostedCall& call : post.calls) {
    CallBytes facts;
    if (!reader.get(&facts, sizeof facts) || !reader.get(call.ranks) || !reader.get(call.site) ||
        !reader.get(call.label) || !reader.get(call.shape))
      return std::nullopt;
    if (facts.operation >= kOperationCount || facts.dtype >= kDtypeCount ||
        facts.reduction >= kReductionCount || facts.wire >= kDtypeCount ||
        facts.device > static_cast<uint8_t>(DeviceType::cuda))
      return std::nullopt;
    CallDescriptor& d = call.facts;
    d.elems = facts.elems;
    d.root = static_cast<uint16_t>(facts.root);
    d.label = facts.label;
    d.site = facts.site;
    d.shape = facts.shape;
    d.operation = static_cast<Operation>(facts.operation);
    d.dtype = static_cast<Dtype>(facts.dtype);
    d.reduction = static_cast<Reduction>(facts.reduction);
    d.has_parts = facts.has_parts & 1;
    d.strict_sites = facts.strict_sites & 1;
    d.wire = static_cast<Dtype>(facts.wire);
    d.device = static_cast<DeviceType>(facts.device);
  }
  if (!reader.is_at_end()) return std::nullopt;
  return post;
}

}  // namespace photinus
