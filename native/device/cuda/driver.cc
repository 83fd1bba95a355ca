#include "device/cuda/driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <mutex>

namespace photinus::cuda {
namespace {

std::string version_text(int version) {
  return text("%d.%d", version / 1000, version % 1000 / 10);
}

constexpr const char* kUpdate =
    "Update NVIDIA's driver (12.0 or newer; nvidia-smi shows which is there), or exchange CPU tensors, or "
    "use NCCL.";

const char* advice(CUresult result) {
  if (is_sticky(result))
    return "An earlier kernel of this process, or the GPU itself, has failed, and its CUDA context is of no "
           "more "
           "use: run with CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer to find the kernel (dmesg tells "
           "of "
           "hardware, as Xid), and restart the process.";
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return "The GPU's memory, or what the host may lock (ulimit -l, the control group's limit), is used "
             "up: see "
             "nvidia-smi for who holds it.";
    case CUDA_ERROR_NOT_INITIALIZED:
    case CUDA_ERROR_DEINITIALIZED:
      return "CUDA does not work in a child forked after its first use (start such processes with spawn), "
             "nor while "
             "the process ends.";
    case CUDA_ERROR_STUB_LIBRARY:
      return "The libcuda found is a toolkit's stub for linking: take its folder out of LD_LIBRARY_PATH.";
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_INVALID_DEVICE:
      return "No such GPU is to be seen: look at nvidia-smi and CUDA_VISIBLE_DEVICES, and whether the "
             "container was "
             "started with its GPUs.";
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
      return "Another process holds the GPU: nvidia-smi shows it.";
    case CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
      return "Somebody else in this process has registered this memory: that is a fault of this program.";
    case CUDA_ERROR_NOT_PERMITTED:
    case CUDA_ERROR_NOT_SUPPORTED:
      return "This system (a sandbox, a virtual GPU) does not allow it: exchange CPU tensors, or use NCCL.";
    case CUDA_ERROR_SYSTEM_NOT_READY:
      return "The machine's GPUs are not ready yet: is the fabric manager, or nvidia-persistenced, running?";
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
      return "libcuda and the kernel's driver are of different versions: reboot after an update, or mend the "
             "container's mounts.";
    default:
      return "CUDA's manual has the meaning of this code.";
  }
}

}  // namespace

bool is_sticky(CUresult result) {
  switch (result) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
      return true;
    default:
      return false;
  }
}

Error Driver::error(const char* call, CUresult result, const std::string& where) const {
  const char *name = nullptr, *meaning = nullptr;
  if (!cuGetErrorName.address || cuGetErrorName(result, &name) != CUDA_SUCCESS) name = nullptr;
  if (!cuGetErrorString.address || cuGetErrorString(result, &meaning) != CUDA_SUCCESS) meaning = nullptr;
  return Error(ErrorKind::system,
               text("%s failed%s%s: %s (%d), %s. %s", call, where.empty() ? "" : " on ", where.c_str(),
                    name ? name : "an unknown error", static_cast<int>(result),
                    meaning ? meaning : "of which the driver knows no more", advice(result)));
}

std::shared_ptr<const Driver> Driver::open(const Paths& paths) {
  const char* const name = paths.nvidia.c_str();
  void* const library =
      dlopen(name, RTLD_NOW | RTLD_LOCAL);  // stays open: its threads outlive whoever used it
  if (!library) {
    const std::string reason = dlerror();
    if (access(paths.amd.c_str(), F_OK) == 0)
      throw Error(
          ErrorKind::system,
          text("CUDA tensors need NVIDIA's driver; this machine has AMD's (%s), and ROCm is not supported "
               "(%s). Exchange CPU tensors, or use the nccl backend, which is RCCL there.",
               paths.amd.c_str(), reason.c_str()));
    throw Error(
        ErrorKind::system,
        text("CUDA tensors need NVIDIA's driver, and its library cannot be opened: %s. Install the driver, "
             "or start the container with its GPUs (docker run --gpus all).",
             reason.c_str()));
  }
  const std::shared_ptr<Driver> driver(new Driver);
  using GetProcAddress = CUresult (*)(const char*, void**, int, uint64_t, CUdriverProcAddressQueryResult*);
  const auto find = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  EntryPoint* const for_messages[] = {&driver->cuDriverGetVersion, &driver->cuGetErrorName,
                                      &driver->cuGetErrorString};
  for (EntryPoint* entry : for_messages) entry->address = dlsym(library, entry->name);
  if (driver->cuDriverGetVersion.address) driver->call(name, driver->cuDriverGetVersion, &driver->version_);
  if (!find || driver->version_ < kInterface)
    throw Error(ErrorKind::system,
                text("%s is too old: %s, and CUDA tensors need %s. %s", name,
                     driver->version_ ? ("it is of CUDA " + version_text(driver->version_)).c_str()
                                      : "it does not say of which version it is",
                     version_text(kInterface).c_str(), kUpdate));
  for (EntryPoint* entry : driver->all_) {
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
    const CUresult result =
        find(entry->name, &entry->address, kInterface, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &status);
    if (result != CUDA_SUCCESS || status != CU_GET_PROC_ADDRESS_SUCCESS || !entry->address)
      throw Error(ErrorKind::system,
                  text("%s, of CUDA %s, has no %s (cuGetProcAddress: result %d, status %d). %s", name,
                       version_text(driver->version_).c_str(), entry->name, static_cast<int>(result),
                       static_cast<int>(status), kUpdate));
  }
  driver->call("", driver->cuInit, 0);
  driver->call("", driver->cuDeviceGetCount, &driver->devices_);
  if (driver->devices_ == 0) throw driver->error("cuDeviceGetCount", CUDA_ERROR_NO_DEVICE, "");
  return driver;
}

std::shared_ptr<const Driver> Driver::of_this_process() {
  static std::mutex mutex;
  static auto* driver = new std::shared_ptr<const Driver>;  // leaked: used until the process ends
  static pid_t owner = 0;
  std::lock_guard lock(mutex);
  if (!*driver) {
    *driver = open({});
    owner = getpid();
  }
  if (owner != getpid())
    throw Error(
        ErrorKind::system,
        text("CUDA was used in process %d before it forked this one (%d), where it does not work: start "
             "processes that use CUDA with spawn, or before the first CUDA tensor.",
             owner, getpid()));
  return *driver;
}

}  // namespace photinus::cuda
