#include "engine/host_tensors.h"

#include <unistd.h>

#include <algorithm>

#include "base/clock.h"
#include "device/host.h"

namespace photinus {
namespace {

using cuda::Way;

constexpr size_t kFlights = 4;  // of one operation at a time: others want blocks, too

}  // namespace

HostTensors::HostTensors(std::shared_ptr<cuda::CudaDevice> device, cuda::CUstream stream,
                         std::shared_ptr<Arena> arena)
    : device_(std::move(device)), arena_(std::move(arena)), begin_(device_->engines.record(stream)) {}

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

// A copy that fails to begin may be under way all the same.
uint64_t HostTensors::start(Way way, std::byte* block, const Tensor& tensor, size_t bytes) {
  cuda::CopyEngines& engines = device_->engines;
  std::byte* const there = tensor.there + at_;
  uint64_t& newest = newest_[static_cast<size_t>(way)];
  try {
    if (begin_) engines.wait_for(begin_, way);
    begin_.reset();
    newest = engines.start_copy(way == Way::to_host ? block : there, way == Way::to_host ? there : block,
                                bytes, false);
  } catch (const Error&) {
    newest = engines.newest(way);
    device_->give_block(block, newest);
    throw;
  }
  at_ += bytes;
  return newest;
}

bool HostTensors::bring(bool& moved) {
  size_t bytes = 0;
  while (const Tensor* const tensor = next_piece(&Tensor::read, bytes)) {
    std::byte* const block = flights_.size() < kFlights ? device_->take_block() : nullptr;
    if (!block) break;
    std::byte* const to = tensor->here + at_;
    flights_.push_back({block, start(Way::to_host, block, *tensor, bytes), to, bytes});
    moved = true;
  }
  while (!flights_.empty() && device_->engines.poll(flights_.front().ticket)) {
    const Flight landed = flights_.front();
    flights_.pop_front();
    host::copy(landed.to, landed.block, landed.bytes);
    device_->give_block(landed.block, landed.ticket);
    moved = true;
  }
  if (!flights_.empty() || next_ < tensors_.size()) return false;
  next_ = 0;
  return true;
}

bool HostTensors::give_back(bool& moved) {
  size_t bytes = 0;
  while (const Tensor* const tensor = next_piece(&Tensor::written, bytes)) {
    std::byte* const block = device_->take_block();
    if (!block) return false;
    host::copy(block, tensor->here + at_, bytes);
    device_->give_block(block, start(Way::to_gpu, block, *tensor, bytes));
    moved = true;
  }
  if (newest_[static_cast<size_t>(Way::to_gpu)] != 0) end_ = device_->engines.record(Way::to_gpu);
  free();
  return true;
}

double HostTensors::nap_s() const {
  return device_->engines.nap_s(flights_.empty() ? device_->engines.newest(Way::to_gpu)
                                                 : flights_.front().ticket);
}

void HostTensors::give_up(double limit_s, bool is_over) {
  for (const Flight& flight : flights_) device_->give_block(flight.block, flight.ticket);
  flights_.clear();
  for (const Deadline deadline = Deadline::in(limit_s); !has_landed() && !deadline.passed();) usleep(200);
  if (is_over)
    for (const Tensor& tensor : tensors_) arena_->retire(tensor.here);
  free();
}

bool HostTensors::has_landed() {
  return std::all_of(std::begin(newest_), std::end(newest_),
                     [&](uint64_t ticket) { return ticket == 0 || device_->engines.has_ended(ticket); });
}

void HostTensors::order(cuda::CUstream stream) {
  if (end_) device_->engines.make_wait(stream, end_);
}

void HostTensors::free() {
  for (const Tensor& tensor : tensors_) arena_->free(tensor.here);
  tensors_.clear();
}

}  // namespace photinus
