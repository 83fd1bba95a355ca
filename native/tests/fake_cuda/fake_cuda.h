// A libcuda.so.1 that is none: the entry points that device/cuda calls, over host memory, and this face for
// tests, which stands for all that others in the process do with a GPU. LD_LIBRARY_PATH, or the path given to
// Driver::open, finds it.
//
// Each direction of copies has a thread, kernels have one, and what else is in streams; copies take random
// time. From when a copy begins its destination is garbage, and its source is read when it ends. It is
// stricter than CUDA: copies reach registered memory only, each call that is not known to be safe harms a
// capture, and nothing may be put into a captured stream.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "device/cuda/types.h"

namespace photinus::test {

class FakeCuda {
 public:
  virtual ~FakeCuda() = default;

  // Forgets everything, and behaves as words with spaces between them say (or the environment's
  // PHOTINUS_FAKE_CUDA, when the library is loaded):
  //   seed=N  gpus=N  version=12040  mode=N (of computing)  without=NAME (an entry point)
  //   fail=NAME:N:CODE   the N-th call of NAME returns CODE; a fault of a kernel then stays
  //   lasts=NAME:N:MS    the N-th call of NAME, or the copy that it starts, takes so long
  virtual void configure(const std::string& words) = 0;
  // What was made, retained or registered and not given back: "1 stream, 2 events"; empty when nothing is.
  virtual std::string alive() = 0;
  // How much memory of the host is locked; what several ranks of a process lock counts for each.
  virtual uint64_t registered_bytes() = 0;
  // Since it was configured: calls by name, and copies whose destination is garbage by now.
  virtual std::map<std::string, uint64_t> calls() = 0;
  virtual uint64_t copies_begun() = 0;

  virtual void* allocate(size_t bytes) = 0;  // memory of the GPU; the processor may look at it, as tests do
  virtual void free(void* memory) = 0;
  virtual void release(void* memory) = 0;  // the same; its address may come again
  // A stream of somebody else; a blocking one minds the legacy default stream.
  virtual cuda::CUstream make_stream(bool blocking) = 0;
  // Puts a kernel into a stream. It ends after some time with a fault, if that is not 0.
  virtual void launch(cuda::CUstream stream, double lasts_s, std::function<void()> kernel, int fault = 0) = 0;
  // A capture in the mode "global", which other calls may harm; whether none has.
  virtual void begin_capture(cuda::CUstream stream) = 0;
  virtual bool end_capture(cuda::CUstream stream) = 0;

  // Of the calling thread.
  virtual void* current_context() = 0;
  virtual void set_current_context(void* context) = 0;
  virtual int capture_mode() = 0;
};

// That of the library, which stays loaded.
inline FakeCuda& fake_cuda(const char* path) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  return *reinterpret_cast<FakeCuda* (*)()>(dlsym(library, "fake_cuda_face"))();
}

}  // namespace photinus::test
