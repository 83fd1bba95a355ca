// CUDA's driver: libcuda, opened when the first CUDA tensor comes, and the entry points that we call.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/cuda/types.h"

namespace photinus::cuda {

// One entry point, under its name in CUDA's manual.
struct EntryPoint {
  EntryPoint(std::vector<EntryPoint*>& all, const char* called) : name(called) { all.push_back(this); }
  EntryPoint(const EntryPoint&) = delete;
  EntryPoint& operator=(const EntryPoint&) = delete;

  const char* const name;
  void* address = nullptr;
};
template <class... Args>
struct Entry : EntryPoint {
  using EntryPoint::EntryPoint;
  CUresult operator()(Args... args) const {
    return reinterpret_cast<CUresult (*)(Args...)>(address)(args...);
  }
};

class Driver {
 public:
  // Where things are looked for.
  struct Paths {
    std::string nvidia = "libcuda.so.1";
    std::string amd = "/dev/kfd";  // there where AMD's driver is
  };
  // Opens the library and starts it. Throws Error(system) that says what is missing and what to do: no
  // library, one too old, a symbol absent, no device.
  static std::shared_ptr<const Driver> open(const Paths& paths);
  // That of this process, opened by the first call that succeeds. A forked child of a process that has opened
  // it cannot use CUDA: Error.
  static std::shared_ptr<const Driver> of_this_process();

  int version() const { return version_; }  // 12040 for 12.4
  int devices() const { return devices_; }

  // The error of a call that has failed: its name, `where` (a GPU), CUDA's name and text, what to do.
  Error error(const char* call, CUresult result, const std::string& where) const;
  // Calls, and throws its error.
  template <class... Args>
  void call(const std::string& where, const Entry<Args...>& entry, std::type_identity_t<Args>... args) const {
    if (const CUresult result = entry(args...); result != CUDA_SUCCESS)
      throw error(entry.name, result, where);
  }

 private:
  Driver() = default;
  std::vector<EntryPoint*> all_;
  int version_ = 0, devices_ = 0;

 public:
  Entry<unsigned> cuInit{all_, "cuInit"};
  Entry<int*> cuDriverGetVersion{all_, "cuDriverGetVersion"};
  Entry<CUresult, const char**> cuGetErrorName{all_, "cuGetErrorName"};
  Entry<CUresult, const char**> cuGetErrorString{all_, "cuGetErrorString"};
  Entry<int*> cuDeviceGetCount{all_, "cuDeviceGetCount"};
  Entry<CUdevice*, int> cuDeviceGet{all_, "cuDeviceGet"};
  Entry<char*, int, CUdevice> cuDeviceGetName{all_, "cuDeviceGetName"};
  Entry<char*, int, CUdevice> cuDeviceGetPCIBusId{all_, "cuDeviceGetPCIBusId"};
  Entry<int*, CUdevice_attribute, CUdevice> cuDeviceGetAttribute{all_, "cuDeviceGetAttribute"};
  Entry<CUcontext*, CUdevice> cuDevicePrimaryCtxRetain{all_, "cuDevicePrimaryCtxRetain"};
  Entry<CUdevice> cuDevicePrimaryCtxRelease{all_, "cuDevicePrimaryCtxRelease"};
  Entry<CUcontext> cuCtxPushCurrent{all_, "cuCtxPushCurrent"};
  Entry<CUcontext*> cuCtxPopCurrent{all_, "cuCtxPopCurrent"};
  Entry<CUstreamCaptureMode*> cuThreadExchangeStreamCaptureMode{all_, "cuThreadExchangeStreamCaptureMode"};
  Entry<CUstream*, unsigned> cuStreamCreate{all_, "cuStreamCreate"};
  Entry<CUstream> cuStreamDestroy{all_, "cuStreamDestroy"};
  Entry<CUstream> cuStreamQuery{all_, "cuStreamQuery"};
  Entry<CUstream, CUstreamCaptureStatus*> cuStreamIsCapturing{all_, "cuStreamIsCapturing"};
  Entry<CUstream, CUevent, unsigned> cuStreamWaitEvent{all_, "cuStreamWaitEvent"};
  Entry<CUstream, CUdeviceptr, uint32_t, unsigned> cuStreamWriteValue32{all_, "cuStreamWriteValue32"};
  Entry<CUevent*, unsigned> cuEventCreate{all_, "cuEventCreate"};
  Entry<CUevent> cuEventDestroy{all_, "cuEventDestroy"};
  Entry<CUevent, CUstream> cuEventRecord{all_, "cuEventRecord"};
  Entry<void*, size_t, unsigned> cuMemHostRegister{all_, "cuMemHostRegister"};
  Entry<void*> cuMemHostUnregister{all_, "cuMemHostUnregister"};
  Entry<CUdeviceptr*, void*, unsigned> cuMemHostGetDevicePointer{all_, "cuMemHostGetDevicePointer"};
  Entry<void*, CUdeviceptr, size_t, CUstream> cuMemcpyDtoHAsync{all_, "cuMemcpyDtoHAsync"};
  Entry<CUdeviceptr, const void*, size_t, CUstream> cuMemcpyHtoDAsync{all_, "cuMemcpyHtoDAsync"};
  Entry<CUdeviceptr, CUdeviceptr, size_t, CUstream> cuMemcpyDtoDAsync{all_, "cuMemcpyDtoDAsync"};
};

// Whether a result says that the process's context on the GPU is of no more use, whatever is called: a
// kernel, of anybody, or the hardware has failed.
bool is_sticky(CUresult result);

}  // namespace photinus::cuda
