#include <sys/wait.h>

#include <mutex>

#include "base/log.h"
#include "cuda_rig.h"

using namespace photinus;
using namespace photinus::cuda;
using namespace photinus::test;

TEST(what_is_missing_is_said_in_one_line) {
  auto says = [](const std::string& words, const std::vector<std::string>& parts) {
    fake().configure(words);
    auto [kind, message] = error_of([] { CopyEngines(std::make_shared<const Gpu>(driver(), 0)); });
    CHECK(kind == ErrorKind::system);
    CHECK(message.find('\n') == std::string::npos);
    for (const std::string& part : parts) CHECK_CONTAINS(message, part);
  };
  says("version=11040",
       {"is too old: it is of CUDA 11.4, and CUDA tensors need 12.0", "Update NVIDIA's driver"});
  says("without=cuStreamWriteValue32",
       {"of CUDA 12.4, has no cuStreamWriteValue32", "Update NVIDIA's driver"});
  says("gpus=0", {"cuInit failed: CUDA_ERROR_NO_DEVICE (100)", "CUDA_VISIBLE_DEVICES"});
  says("mode=3",
       {"cuDevicePrimaryCtxRetain failed on GPU 0 (Fake, 0000:01:00.0): CUDA_ERROR_DEVICE_UNAVAILABLE (46)",
        "EXCLUSIVE_PROCESS", "nvidia-smi -c DEFAULT"});
  says("fail=cuMemHostRegister:1:800",
       {"cuMemHostRegister failed on GPU 0", "for 4096 bytes of host memory at 0x",
        "CUDA_ERROR_NOT_PERMITTED (800)", "exchange CPU tensors"});
  says("fail=cuMemHostRegister:1:2", {"CUDA_ERROR_OUT_OF_MEMORY (2)", "ulimit -l"});
  says("fail=cuDriverGetVersion:1:34", {"libcuda.so.1", "stub"});
  CHECK(fake().alive().empty());
  auto from = [](const char* library, const char* amd) {
    return error_of([&] { Driver::open({library, amd}); }).second;
  };
  CHECK_CONTAINS(from("/nonexistent/libcuda.so.1", "/dev/null/none"),
                 "its library cannot be opened: /nonexistent");
  CHECK_CONTAINS(from("/nonexistent/libcuda.so.1", "/dev/null/none"), "Install the driver");
  CHECK_CONTAINS(from("/nonexistent/libcuda.so.1", "/dev/null"), "ROCm is not supported");
  CHECK_CONTAINS(from("libm.so.6", "/dev/null/none"), "too old: it does not say of which version it is");
  fake().configure("gpus=2");
  auto [kind, message] = error_of([] { Gpu(driver(), 2); });
  CHECK(kind == ErrorKind::invalid_argument);
  CHECK_CONTAINS(message, "GPU 2: there are 2");
}

// Everything once; a copy that failed is tried again, as a caller could.
static void do_everything(std::string& complaints) {
  auto note = [&](const Error& error) { complaints += std::string(error.what()) + "\n"; };
  const auto ring = shared_pages(kBytes);
  auto* const tensor = static_cast<std::byte*>(fake().allocate(kBytes));
  const CUstream caller = fake().make_stream(true);
  fill(ring.get(), 1);
  fill(tensor, 2);
  CopyEngines engines(std::make_shared<const Gpu>(driver(), 0));
  engines.add_memory(ring, kBytes);
  wait_for(engines, caller);
  for (const bool to_host : {true, false}) {
    std::byte *const to = to_host ? ring.get() : tensor + 100, *const from =
                                                                   to_host ? tensor : ring.get() + 100;
    uint64_t ticket = 0;
    try {
      ticket = engines.start_copy(to, from, 100, false);
    } catch (const Error& error) {
      note(error);
      ticket = engines.start_copy(to, from, 100, false);
    }
    while (!engines.poll(ticket)) usleep(20);
    CHECK(all_are(to, to_host ? 2 : 1, 100));
  }
  make_wait(engines, caller);
}

TEST(each_call_that_fails_once_ends_in_an_error_that_names_it_and_leaks_nothing) {
  std::string complaints;
  fake().configure("");
  do_everything(complaints);
  CHECK(complaints.empty() && fake().alive().empty());
  auto calls = fake().calls();
  CHECK(calls.size() == 26);  // every entry point, but for the two that tell what an error means
  std::mutex mutex;
  set_listener([&](const std::string& line) {
    std::lock_guard lock(mutex);
    complaints += line + "\n";
  });
  for (const auto& [name, times] : calls) {
    for (uint64_t call = 1; call <= times; ++call) {
      for (const int code : {2, 700}) {
        complaints.clear();
        fake().configure(text("fail=%s:%llu:%d seed=%llu", name.c_str(), (unsigned long long)call, code,
                              (unsigned long long)call));
        const double start = now_s();
        try {
          do_everything(complaints);
        } catch (const Error& error) {
          complaints += error.what();
        }
        CHECK(now_s() - start < 5);
        CHECK(fake().current_context() == nullptr);
        CHECK(fake().capture_mode() == CU_STREAM_CAPTURE_MODE_GLOBAL);
        // Nothing can be given back to a context that is dead, and who gives back says nothing of it.
        const bool of_driver = name == "cuInit" || name == "cuDeviceGetCount" || name == "cuDriverGetVersion";
        if (fake().calls()[name] < call) {
          CHECK(complaints.empty());  // copies were asked after fewer times than before
        } else if (code == 2) {
          CHECK_CONTAINS(complaints, name + " failed");
          CHECK_CONTAINS(complaints, "CUDA_ERROR_OUT_OF_MEMORY (2)");
          if (!of_driver) CHECK_CONTAINS(complaints, "GPU 0");
          CHECK(fake().alive().empty());
        } else if (!complaints.empty()) {
          CHECK_CONTAINS(complaints, "CUDA_ERROR_ILLEGAL_ADDRESS (700)");
          CHECK_CONTAINS(complaints, "An earlier kernel of this process");
        }
      }
    }
  }
  set_listener({});
}

TEST(a_context_of_the_caller_stays_current) {
  fake().configure("");
  int own = 0;
  fake().set_current_context(&own);
  std::string complaints;
  do_everything(complaints);
  CHECK(fake().current_context() == &own);
  fake().configure("fail=cuMemcpyDtoHAsync:1:700");
  error_of([&] { do_everything(complaints); });
  CHECK(fake().current_context() == &own);
  fake().set_current_context(nullptr);
}

TEST(a_copy_behind_a_call_that_failed_is_not_seen_as_landed_early) {
  for (const char* call :
       {"cuStreamWriteValue32:1", "cuCtxPopCurrent:4", "cuThreadExchangeStreamCaptureMode:10"}) {
    const Rig rig(text("fail=%s:2 lasts=cuMemcpyDtoHAsync:2:150", call));
    fill(rig.tensor, 8);
    error_of([&] { rig.engines->start_copy(rig.ring.get(), rig.tensor, 100, false); });
    const uint64_t ticket = rig.engines->start_copy(rig.ring.get(), rig.tensor, 100, false);
    CHECK(!rig.engines->poll(ticket));
    rig.await(ticket);
    CHECK(all_are(rig.ring.get(), 8, 100));
  }
}

TEST(a_call_that_fails_leaves_no_copy_under_way_behind_it) {
  const Rig rig("fail=cuStreamWriteValue32:1:2 lasts=cuMemcpyDtoHAsync:1:40");
  error_of([&] { rig.engines->start_copy(rig.ring.get(), rig.tensor, 100, false); });
  fill(rig.ring.get(), 5);
  usleep(80000);
  CHECK(all_are(rig.ring.get(), 5));
}

TEST(a_kernel_that_faults_ends_the_wait_for_copies_behind_it_with_what_to_do) {
  Rig rig;
  fake().launch(rig.caller, 0.01, {}, CUDA_ERROR_ILLEGAL_ADDRESS);
  wait_for(*rig.engines, rig.caller);
  const uint64_t ticket = rig.engines->start_copy(rig.ring.get(), rig.tensor, 100, false);
  const double start = now_s();
  auto [kind, message] = error_of([&] { rig.await(ticket); });
  CHECK(kind == ErrorKind::system);
  CHECK_CONTAINS(message, "on GPU 0 (Fake, 0000:01:00.0): CUDA_ERROR_ILLEGAL_ADDRESS (700)");
  CHECK_CONTAINS(message, "An earlier kernel of this process, or the GPU itself, has failed");
  CHECK_CONTAINS(message, "CUDA_LAUNCH_BLOCKING=1");
  error_of([&] { rig.engines->start_copy(rig.ring.get(), rig.tensor, 100, false); });
  rig.engines.reset();
  CHECK(now_s() - start < 1);
}

TEST(a_copy_that_never_ends_is_never_seen_as_landed_and_its_memory_is_kept_for_ever) {
  Rig rig("lasts=cuMemcpyDtoHAsync:1:1000000");
  const std::weak_ptr<std::byte> ring = rig.ring;
  const uint64_t ticket = rig.engines->start_copy(rig.ring.get(), rig.tensor, 100, false);
  const double start = now_s();
  while (now_s() - start < 0.03 || fake().copies_begun() == 0) {
    CHECK(!rig.engines->poll(ticket));
    CHECK(now_s() - start < 10);
  }
  CHECK(all_are(rig.ring.get(), 0xee, 100));
  rig.ring.reset();
  rig.engines.reset();
  CHECK(now_s() - start < 5);
  CHECK(!ring.expired());
  CHECK(fake().calls()["cuMemHostUnregister"] == 0);
  fake().configure("");
}

TEST(a_copy_under_way_is_waited_for_before_its_memory_is_let_go) {
  Rig rig("lasts=cuMemcpyDtoHAsync:1:50");
  fill(rig.tensor, 6);
  rig.engines->start_copy(rig.ring.get(), rig.tensor, kBytes, false);
  rig.engines.reset();
  CHECK(all_are(rig.ring.get(), 6));
  CHECK(fake().alive().empty());
}

#if !defined(__SANITIZE_THREAD__)  // which does not go on in forked children
TEST(a_forked_child_is_told_that_cuda_does_not_work_there_and_leaves_the_driver_alone) {
  Rig rig;
  const pid_t child = fork();
  if (child == 0) {
    auto [kind, message] = error_of([&] { rig.engines->start_copy(rig.ring.get(), rig.tensor, 100, false); });
    CHECK(kind == ErrorKind::system);
    CHECK_CONTAINS(message, "before it forked this one, where CUDA does not work");
    rig.engines.reset();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  rig.await(rig.engines->start_copy(rig.ring.get(), rig.tensor, 100, false));
}
#endif
