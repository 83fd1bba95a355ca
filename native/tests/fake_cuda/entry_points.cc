// What the fake libcuda.so.1 gives out by cuGetProcAddress: the entry points that device/cuda/driver.h lists.
#include <cstdio>
#include <cstring>

#include "fake_gpu.h"

namespace photinus::test {

std::vector<CUcontext>& contexts_of_thread();
CUstreamCaptureMode& mode_of_thread();

namespace {

FakeGpu& gpu() {
  return FakeGpu::instance();
}

constexpr unsigned kPlain = FakeGpu::kPlain, kContext = FakeGpu::kContext, kHarms = FakeGpu::kHarms,
                   kGivesBack = FakeGpu::kGivesBack, kAlways = FakeGpu::kAlways;
constexpr uintptr_t kSeenByGpu = uintptr_t{1} << 60;  // registered memory has another address there

template <class... Args>
void* address(CUresult (*entry)(Args...)) {
  return reinterpret_cast<void*>(entry);
}

CUresult put_text(char* out, int size, const char* text) {
  std::snprintf(out, static_cast<size_t>(size), "%s", text);
  return CUDA_SUCCESS;
}

const char* name_of(CUresult result) {
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return "CUDA_ERROR_OUT_OF_MEMORY";
    case CUDA_ERROR_NO_DEVICE:
      return "CUDA_ERROR_NO_DEVICE";
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
      return "CUDA_ERROR_DEVICE_UNAVAILABLE";
    case CUDA_ERROR_NOT_PERMITTED:
      return "CUDA_ERROR_NOT_PERMITTED";
    case CUDA_ERROR_ILLEGAL_ADDRESS:
      return "CUDA_ERROR_ILLEGAL_ADDRESS";
    default:
      return "CUDA_ERROR_OF_ANOTHER_KIND";
  }
}

CUresult error_name(CUresult result, const char** out) {
  return *out = name_of(result), CUDA_SUCCESS;
}
CUresult error_string(CUresult, const char** out) {
  return *out = "as the fake driver was told", CUDA_SUCCESS;
}
CUresult driver_version(int* out) {
  return gpu().enter("cuDriverGetVersion", kAlways, [&] { return *out = gpu().version, CUDA_SUCCESS; });
}

const std::map<std::string, void*>& entry_points() {
  static const auto* const all = new std::map<std::string, void*>{
      {"cuInit", address(+[](unsigned) {
         return gpu().enter("cuInit", kAlways, [] {
           gpu().initialized = gpu().gpus > 0;
           return gpu().initialized ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
         });
       })},
      {"cuDriverGetVersion", address(driver_version)},
      {"cuGetErrorName", address(error_name)},
      {"cuGetErrorString", address(error_string)},
      {"cuDeviceGetCount", address(+[](int* out) {
         return gpu().enter("cuDeviceGetCount", kPlain, [&] { return *out = gpu().gpus, CUDA_SUCCESS; });
       })},
      {"cuDeviceGet", address(+[](CUdevice* out, int index) {
         return gpu().enter("cuDeviceGet", kPlain, [&] {
           *out = index;
           return index < gpu().gpus ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
         });
       })},
      {"cuDeviceGetName", address(+[](char* out, int size, CUdevice) {
         return gpu().enter("cuDeviceGetName", kPlain, [&] { return put_text(out, size, "Fake"); });
       })},
      {"cuDeviceGetPCIBusId", address(+[](char* out, int size, CUdevice) {
         return gpu().enter("cuDeviceGetPCIBusId", kPlain,
                            [&] { return put_text(out, size, "0000:01:00.0"); });
       })},
      {"cuDeviceGetAttribute", address(+[](int* out, CUdevice_attribute, CUdevice) {
         return gpu().enter("cuDeviceGetAttribute", kPlain,
                            [&] { return *out = gpu().compute_mode, CUDA_SUCCESS; });
       })},
      {"cuDevicePrimaryCtxRetain", address(+[](CUcontext* out, CUdevice device) {
         return gpu().enter("cuDevicePrimaryCtxRetain", kHarms, [&] {
           if (gpu().compute_mode != 0) return CUDA_ERROR_DEVICE_UNAVAILABLE;
           gpu().retained[device] += 1;
           *out = gpu().contexts[static_cast<size_t>(device)];
           return CUDA_SUCCESS;
         });
       })},
      {"cuDevicePrimaryCtxRelease", address(+[](CUdevice device) {
         return gpu().enter("cuDevicePrimaryCtxRelease", kHarms | kGivesBack,
                            [&] { return gpu().retained[device] -= 1, CUDA_SUCCESS; });
       })},
      {"cuCtxPushCurrent", address(+[](CUcontext context) {
         return gpu().enter("cuCtxPushCurrent", kPlain,
                            [&] { return contexts_of_thread().push_back(context), CUDA_SUCCESS; });
       })},
      {"cuCtxPopCurrent", address(+[](CUcontext* out) {
         return gpu().enter("cuCtxPopCurrent", kContext | kGivesBack, [&] {
           *out = contexts_of_thread().back();
           contexts_of_thread().pop_back();
           return CUDA_SUCCESS;
         });
       })},
      {"cuThreadExchangeStreamCaptureMode", address(+[](CUstreamCaptureMode* mode) {
         return gpu().enter("cuThreadExchangeStreamCaptureMode", kGivesBack,
                            [&] { return std::swap(*mode, mode_of_thread()), CUDA_SUCCESS; });
       })},
      {"cuStreamCreate", address(+[](CUstream* out, unsigned flags) {
         return gpu().enter("cuStreamCreate", kContext | kHarms, [&] {
           gpu().streams.push_back({.ours = true, .blocking = !(flags & CU_STREAM_NON_BLOCKING)});
           *out = reinterpret_cast<CUstream>(&gpu().streams.back());
           return CUDA_SUCCESS;
         });
       })},
      {"cuStreamDestroy", address(+[](CUstream handle) {
         return gpu().enter("cuStreamDestroy", kContext | kHarms | kGivesBack, [&] {
           Stream* const stream = gpu().find(handle);
           if (!stream) return CUDA_ERROR_INVALID_HANDLE;
           stream->destroyed = true;
           return CUDA_SUCCESS;
         });
       })},
      {"cuStreamQuery", address(+[](CUstream handle) {
         return gpu().enter("cuStreamQuery", kHarms, [&] {
           Stream* const stream = gpu().find(handle);
           if (!stream) return CUDA_ERROR_INVALID_HANDLE;
           return stream->operations.empty() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
         });
       })},
      {"cuStreamIsCapturing", address(+[](CUstream handle, CUstreamCaptureStatus* out) {
         return gpu().enter("cuStreamIsCapturing", kPlain, [&] {
           Stream* const stream = gpu().find(handle);
           if (!stream) return CUDA_ERROR_INVALID_HANDLE;
           if (!handle)
             for (const Stream& other : gpu().streams)
               if (other.capturing && other.blocking) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
           *out = stream->capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
           return CUDA_SUCCESS;
         });
       })},
      {"cuStreamWaitEvent", address(+[](CUstream stream, CUevent handle, unsigned) {
         return gpu().enter("cuStreamWaitEvent", kPlain, [&] {
           const auto& reached = FakeGpu::event(handle)->reached;
           if (!reached) return CUDA_SUCCESS;  // never recorded
           return gpu().put(stream, {.kind = Operation::wait, .reached = reached});
         });
       })},
      {"cuStreamWriteValue32", address(+[](CUstream stream, CUdeviceptr at, uint32_t value, unsigned) {
         return gpu().enter("cuStreamWriteValue32", kContext, [&] {
           auto* const word = reinterpret_cast<std::atomic<uint32_t>*>(at & ~kSeenByGpu);
           if (!(at & kSeenByGpu) || !gpu().is_registered(word, sizeof *word))
             return CUDA_ERROR_INVALID_VALUE;
           return gpu().put(stream, {.kind = Operation::write, .word = word, .value = value});
         });
       })},
      {"cuEventCreate", address(+[](CUevent* out, unsigned) {
         return gpu().enter("cuEventCreate", kContext | kHarms, [&] {
           *out = reinterpret_cast<CUevent>(&gpu().events.emplace_back());
           return CUDA_SUCCESS;
         });
       })},
      {"cuEventDestroy", address(+[](CUevent handle) {
         return gpu().enter("cuEventDestroy", kContext | kHarms | kGivesBack,
                            [&] { return FakeGpu::event(handle)->destroyed = true, CUDA_SUCCESS; });
       })},
      {"cuEventRecord", address(+[](CUevent handle, CUstream stream) {
         return gpu().enter("cuEventRecord", kContext, [&] {
           auto& reached = FakeGpu::event(handle)->reached = std::make_shared<bool>(false);
           return gpu().put(stream, {.kind = Operation::record, .reached = reached});
         });
       })},
      {"cuMemHostRegister", address(+[](void* at, size_t bytes, unsigned) {
         return gpu().enter("cuMemHostRegister", kContext | kHarms, [&] {
           const auto* first = static_cast<std::byte*>(at);
           if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
           // Ranks that are threads of a test have one map of what they share, and lock it each for itself.
           if (const auto same = gpu().registered.find(first);
               same != gpu().registered.end() && same->second == bytes)
             return gpu().registered_again[first] += 1, CUDA_SUCCESS;
           for (const auto& [other, size] : gpu().registered)
             if (first < other + size && other < first + bytes)
               return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
           gpu().registered[first] = bytes;
           return CUDA_SUCCESS;
         });
       })},
      {"cuMemHostUnregister", address(+[](void* at) {
         return gpu().enter("cuMemHostUnregister", kContext | kHarms | kGivesBack, [&] {
           auto& again = gpu().registered_again[static_cast<std::byte*>(at)];
           if (again > 0) return again -= 1, CUDA_SUCCESS;
           return gpu().registered.erase(static_cast<std::byte*>(at)) ? CUDA_SUCCESS
                                                                      : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
         });
       })},
      {"cuMemHostGetDevicePointer", address(+[](CUdeviceptr* out, void* at, unsigned) {
         return gpu().enter("cuMemHostGetDevicePointer", kContext, [&] {
           *out = reinterpret_cast<uintptr_t>(at) | kSeenByGpu;
           return gpu().is_registered(at, 1) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
         });
       })},
      {"cuMemcpyDtoHAsync", address(+[](void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
         return gpu().start_copy("cuMemcpyDtoHAsync", Operation::to_host, to, reinterpret_cast<void*>(from),
                                 bytes, stream);
       })},
      {"cuMemcpyHtoDAsync", address(+[](CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
         return gpu().start_copy("cuMemcpyHtoDAsync", Operation::to_gpu, reinterpret_cast<void*>(to), from,
                                 bytes, stream);
       })},
      {"cuMemcpyDtoDAsync", address(+[](CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
         return gpu().start_copy("cuMemcpyDtoDAsync", Operation::to_gpu, reinterpret_cast<void*>(to),
                                 reinterpret_cast<void*>(from), bytes, stream);
       })},
  };
  return *all;
}

}  // namespace
}  // namespace photinus::test

using namespace photinus::cuda;
using photinus::test::FakeGpu;

extern "C" {

CUresult cuGetProcAddress_v2(const char* symbol, void** out, int version, uint64_t,
                             CUdriverProcAddressQueryResult* status) {
  const auto& all = photinus::test::entry_points();
  const auto found = all.find(symbol);
  const bool is_there = found != all.end() && !FakeGpu::instance().without.contains(symbol);
  *out = is_there && version <= FakeGpu::instance().version ? found->second : nullptr;
  *status = *out       ? CU_GET_PROC_ADDRESS_SUCCESS
            : is_there ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                       : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuDriverGetVersion(int* out) {
  return photinus::test::driver_version(out);
}

CUresult cuGetErrorName(CUresult result, const char** out) {
  return photinus::test::error_name(result, out);
}

CUresult cuGetErrorString(CUresult result, const char** out) {
  return photinus::test::error_string(result, out);
}

photinus::test::FakeCuda* fake_cuda_face() {
  return &FakeGpu::instance();
}
}
