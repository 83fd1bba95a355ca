#include "engine/host_tensors.h"

#include <algorithm>

#include "base/error.h"
#include "device/host.h"

namespace photinus {
namespace {

using cuda::Way;

constexpr size_t kFlights = 4;  // of one operation at a time: others want blocks, too

}  // namespace

std::byte* HostTensors::copy_of(const void* tensor, uint64_t bytes, bool read, bool written) {
  auto* const there = static_cast<std::byte*>(const_cast<void*>(tensor));
  if (bytes == 0 || !there) return there;
  auto same = std::find_if(tensors_.begin(), tensors_.end(),
                           [&](const Tensor& t) { return t.there == there && t.bytes == bytes; });
  if (same == tensors_.end())
    same = tensors_.insert(same, {there, arena_->allocate(bytes), bytes, false, false});
  same->read |= read;
  same->written |= written;
  return same->here;
}

const HostTensors::Tensor* HostTensors::next_piece(bool Tensor::* wanted, size_t& bytes) {
  for (; next_ < tensors_.size(); ++next_, at_ = 0) {
    const Tensor& tensor = tensors_[next_];
    bytes = std::min<uint64_t>(tensor.bytes - at_, cuda::CudaDevice::kBlockBytes);
    if (tensor.*wanted && bytes > 0) return &tensor;
  }
  return nullptr;
}

uint64_t HostTensors::start(Way way, std::byte* block, const Tensor& tensor, size_t bytes) {
  std::byte* const there = tensor.there + at_;
  try {
    copies_.start(way, way == Way::to_host ? block : there, way == Way::to_host ? there : block, bytes);
  } catch (const Error&) {
    copies_.device()->give_block(block, copies_.newest(way));
    throw;
  }
  at_ += bytes;
  return copies_.newest(way);
}

bool HostTensors::bring(bool& moved) {
  size_t bytes = 0;
  while (const Tensor* const tensor = next_piece(&Tensor::read, bytes)) {
    std::byte* const block = flights_.size() < kFlights ? copies_.device()->take_block() : nullptr;
    if (!block) break;
    std::byte* const to = tensor->here + at_;
    flights_.push_back({block, start(Way::to_host, block, *tensor, bytes), to, bytes});
    moved = true;
  }
  while (!flights_.empty() && copies_.have_come(came_ + 1)) {
    came_ += 1;
    const Flight landed = flights_.front();
    flights_.pop_front();
    host::copy(landed.to, landed.block, landed.bytes);
    copies_.device()->give_block(landed.block, landed.ticket);
    moved = true;
  }
  if (!flights_.empty() || next_ < tensors_.size()) return false;
  next_ = 0;
  return true;
}

bool HostTensors::give_back(bool& moved) {
  size_t bytes = 0;
  while (const Tensor* const tensor = next_piece(&Tensor::written, bytes)) {
    std::byte* const block = copies_.device()->take_block();
    if (!block) return false;
    host::copy(block, tensor->here + at_, bytes);
    copies_.device()->give_block(block, start(Way::to_gpu, block, *tensor, bytes));
    moved = true;
  }
  free();
  return true;
}

void HostTensors::give_up(bool is_over) {
  for (const Flight& flight : flights_) copies_.device()->give_block(flight.block, flight.ticket);
  flights_.clear();
  if (is_over)
    for (const Tensor& tensor : tensors_) arena_->retire(tensor.here);
  free();
}

void HostTensors::free() {
  for (const Tensor& tensor : tensors_) arena_->free(tensor.here);
  tensors_.clear();
}

}  // namespace photinus
