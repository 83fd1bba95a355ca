// The Python module photinus._native: the engine with nothing added but the interpreter's ways. The
// interpreter lock is released in every wait; errors become the classes of photinus.errors; Ctrl-C ends a
// wait.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "base/cores.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "call_site.h"
#include "collectives/choose.h"
#include "device/cuda/cuda_device.h"
#include "engine/communicator.h"
#include "hosts/meeting.h"
#include "kernels/reduce.h"
#include "python_objects.h"
#include "shm/local_group.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace photinus {
namespace {

// The class of photinus.errors (or the built-in one) that stands for an engine error.
nb::object python_class(ErrorKind kind) {
  auto own = [](const char* name) { return nb::object(nb::module_::import_("photinus.errors").attr(name)); };
  switch (kind) {
    case ErrorKind::peer_lost:
      return own("PeerLostError");
    case ErrorKind::timeout:
      return own("CollectiveTimeoutError");
    case ErrorKind::mismatch:
      return own("MismatchError");
    case ErrorKind::aborted:
      return own("AbortedError");
    case ErrorKind::interrupted:
      return nb::borrow(PyExc_KeyboardInterrupt);
    case ErrorKind::invalid_argument:
      return nb::borrow(PyExc_ValueError);
    case ErrorKind::system:
      return own("HostError");
  }
  return nb::borrow(PyExc_RuntimeError);
}

// Asks the interpreter whether a signal's handler has raised; handlers run on the main thread only.
bool signal_arrived() {
  if (syscall(SYS_gettid) != getpid()) return false;  // gettid(): since glibc 2.30
  nb::gil_scoped_acquire locked;
  return PyErr_CheckSignals() != 0;
}

// At the interpreter's end all groups are left, which ends the calls of threads that nobody joins. They stay
// where they are: such a thread would show its traceback meanwhile, and an interpreter that finds the lock of
// its standard error held then aborts.
thread_local bool goes_on_at_exit = false;

PyObject* thread_check = nullptr;  // Python's; never let go of

bool has_other_threads() {
  if (exiting.load()) return false;
  nb::gil_scoped_acquire locked;
  return nb::cast<bool>(nb::handle(thread_check)());
}

void wait_for(Work& work, double timeout_s, bool sees = true) {
  struct Stay {
    ~Stay() {
      while (exiting.load() && !goes_on_at_exit) pause();
    }
  } stay;
  work.wait(timeout_s, sees);
}

nb::object error_of(Work& work, bool sees) {
  const Error* error = work.error();
  if (!error) return nb::none();
  if (sees) work.see();
  return python_class(error->kind())(error->what());
}

// Bytes in this process's arena as a Python buffer; the block is given back when the last view of it is
// dropped.
class ArenaBuffer {
 public:
  ArenaBuffer(std::shared_ptr<Arena> arena, size_t bytes)
      : arena_(std::move(arena)), bytes_(bytes), address_(arena_->allocate(bytes)) {}
  ~ArenaBuffer() { arena_->free(address_); }
  ArenaBuffer(const ArenaBuffer&) = delete;
  ArenaBuffer& operator=(const ArenaBuffer&) = delete;

  static int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    auto* buffer = nb::inst_ptr<ArenaBuffer>(nb::handle(self));
    return PyBuffer_FillInfo(view, self, buffer->address_, static_cast<Py_ssize_t>(buffer->bytes_), 0, flags);
  }

 private:
  std::shared_ptr<Arena> arena_;
  size_t bytes_;
  std::byte* address_;
};

PyType_Slot arena_buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(ArenaBuffer::get_buffer)},
                                    {0, nullptr}};

// "10.0.0.1:4000", "[fe80::1%eth0]:4000"
SocketAddress with_port(const std::string& given) {
  const size_t colon = given.rfind(':');
  std::string host = given.substr(0, colon);
  if (host.size() > 1 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const bool has_port = colon != std::string::npos && colon + 1 < given.size() &&
                        given.find_first_not_of("0123456789", colon + 1) == std::string::npos;
  const unsigned long port = has_port ? std::strtoul(given.c_str() + colon + 1, nullptr, 10) : 0;
  if (port == 0 || port > 65535)
    throw Error(ErrorKind::invalid_argument, "'" + given + "' is no address with a port, like 10.0.0.1:4000");
  return numeric_address(host, static_cast<uint16_t>(port));
}

// Where this process listens for ranks of other hosts, from the first call on.
std::vector<std::string> listen(const std::vector<std::string>& addresses) {
  std::vector<SocketAddress> wanted;
  for (const std::string& address : addresses) wanted.push_back(numeric_address(address, 0));
  std::vector<std::string> found;
  for (const SocketAddress& address : Network::of_this_process(wanted)->connections().addresses())
    found.push_back(address.text());
  return found;
}

// Of one rank: a key that ranks which share memory have in common, its host's name, its pid, its addresses.
using Place = std::tuple<std::string, std::string, int, std::vector<std::string>>;

std::shared_ptr<Communicator> connect(uint32_t rank, uint32_t world_size, const std::string& address,
                                      const std::string& name, double timeout_s, double grace_s,
                                      double waiting_s, uint64_t chunk_bytes, bool strict_sites,
                                      const std::vector<Place>& places, const std::string& job,
                                      uint32_t attempt, const std::optional<std::vector<uint32_t>>& levels,
                                      const std::tuple<double, double>& speeds) {
  Communicator::Options options;
  options.rank = rank;
  options.world_size = world_size;
  options.address = address;
  options.name = name;
  options.limits.timeout_s = timeout_s;
  options.limits.grace_s = grace_s;
  options.limits.waiting_s = waiting_s;
  options.strict_sites = strict_sites;
  if (chunk_bytes > 0) options.sizes.chunk_bytes = chunk_bytes;
  for (const auto& [host_key, host_name, pid, addresses] : places) {
    HostPlace& place = options.places.emplace_back(HostPlace{host_key, host_name, pid, {}});
    for (const std::string& each : addresses) place.addresses.push_back(with_port(each));
  }
  options.job = job;
  options.attempt = attempt;
  options.levels = levels;
  options.speeds = {std::get<0>(speeds), std::get<1>(speeds)};
  Unlocked unlocked;
  return Communicator::create(options);
}

// What this thread calls its collectives, for those that bring no label.
thread_local std::string thread_label;

std::string set_label(std::string label) {
  std::swap(label, thread_label);
  return label;
}

constexpr const char* kCallDoc =
    R"(A collective on raw memory: what a rank gives to Communicator.submit or run. It never changes.

Args:
    operation: from OPERATIONS.
    send: the address of what this rank gives: `elems` elements (reduce_scatter: world_size * elems).
    recv: the address for the result: `elems` elements (all_gather: world_size * elems). May equal `send` for
        all_reduce, reduce and broadcast; reduce writes it on the root only.
    elems: number of elements; 0 is allowed, the ranks still meet.
    dtype: from DTYPES.
    reduction: from REDUCTIONS; read by all_reduce, reduce and reduce_scatter.
    root: the rank that gives (broadcast, scatter) or gets (reduce, gather).
    timeout_s: deadline in seconds; 0 for the communicator's.
    asynchronous: False waits where it is submitted, on the caller's thread, and raises what Work.wait would.
    factor: this rank's of premul_sum.
    label: ranks whose labels differ get MismatchError; empty: the thread's (engine.label).
    updates: how often this rank has updated the parameters whose gradients the group exchanges, plus one: ranks
        that differ in it since the call before get MismatchError. Negative: they may differ in it here. 0: not
        told, here and so in the next call.
    wire_dtype: from DTYPES: the type in which values travel between hosts, equal on all ranks. Where all_reduce, reduce
        and reduce_scatter add or multiply, float32 may travel as bfloat16 or float16, and these as float32.
    shape: a tuple: that of the call's tensors. Ranks that differ in it get MismatchError, though counts are equal. None:
        not compared, as where parts have several. Where a root has parts, its shape is compared with each other rank's.
    sends, recvs: in place of `send`, `recv` and `elems` for all_to_all, gather and scatter, and for all_gather
        of different sizes: (address, elements) for each rank, (0, 0) where nothing goes. Sizes must be equal on
        both sides, which is checked before anything is written.
    device: in whose memory the tensors lie (engine.cuda_device), on all ranks or on none; None: in the host's.
    stream: of that device, a CUstream's number; 0 is the legacy default one. The call begins after all that is in
        it when the call is submitted. A call that waits where it is submitted puts the stream behind its copies.)";

cuda::CUstream stream_of(uintptr_t handle) {
  return reinterpret_cast<cuda::CUstream>(handle);
}

using Parts = std::vector<std::tuple<uintptr_t, uint64_t>>;  // address and elements, by rank

void make_call(Submission* made, uint8_t operation, uintptr_t send, uintptr_t recv, uint64_t elems,
               uint8_t dtype, uint8_t reduction, uint32_t root, double timeout_s, bool asynchronous,
               double factor, std::string label, int32_t updates, std::optional<uint8_t> wire_dtype,
               nb::handle shape, const Parts& sends, const Parts& recvs,
               std::shared_ptr<cuda::CudaDevice> device, uintptr_t stream) {
  auto* call = new (made) Submission;
  call->call = {static_cast<Operation>(operation), static_cast<Dtype>(dtype),
                static_cast<Reduction>(reduction), root, elems};
  if (wire_dtype) call->call.wire = static_cast<Dtype>(*wire_dtype);
  call->send = reinterpret_cast<const void*>(send);
  call->recv = reinterpret_cast<void*>(recv);
  for (auto [address, count] : sends) call->send_parts.push_back({reinterpret_cast<void*>(address), count});
  for (auto [address, count] : recvs) call->recv_parts.push_back({reinterpret_cast<void*>(address), count});
  call->factor = factor;
  call->label = std::move(label);
  call->updates = updates;
  if (!shape.is_none()) {
    call->shape = Shape::scalar();
    for (nb::handle size : nb::borrow<nb::tuple>(shape)) call->shape.add(nb::cast<int64_t>(size));
  }
  call->timeout_s = timeout_s;
  call->asynchronous = asynchronous;
  call->device = std::move(device);
  call->stream = stream_of(stream);
}

// The call with what is known only where it is made.
Submission made_here(const Submission& call) {
  Submission given = call;
  if (given.label.empty())
    given.label = thread_label;
  else if (!thread_label.empty())
    given.label += ", " + thread_label;
  given.site = call_site();
  return given;
}

// Waits where it was submitted.
void finish(Work& work, cuda::CUstream stream) {
  wait_for(work, 0);
  work.order(stream);
}

// Raises the error of a call for which nobody has waited.
void raise_lost(Communicator& communicator, bool of_dropped) {
  if (!communicator.has_failures()) return;
  if (const auto lost = communicator.take_failure(of_dropped)) throw Error(*lost);
}

std::shared_ptr<Work> submit(Communicator& communicator, const Submission& call, nb::handle keep) {
  release_dropped();
  Submission given = made_here(call);
  given.owner = owner_of(keep);
  Unlocked unlocked;
  std::shared_ptr<Work> work = communicator.submit(std::move(given));
  if (!call.asynchronous) finish(*work, call.stream);
  return work;
}

void run(Communicator& communicator, const Submission& call) {
  Submission given = made_here(call);
  given.asynchronous = false;
  Unlocked unlocked;
  finish(*communicator.submit(std::move(given)), call.stream);
  raise_lost(communicator, true);
}

std::shared_ptr<Work> message(Communicator& communicator, uint8_t operation, uintptr_t address,
                              uint64_t elems, uint8_t dtype, int64_t peer, int64_t tag, double timeout_s,
                              bool asynchronous, nb::handle keep, std::string kind,
                              std::shared_ptr<cuda::CudaDevice> device, uintptr_t stream) {
  release_dropped();
  MessageCall call;
  call.owner = owner_of(keep);
  call.operation = static_cast<Operation>(operation);
  call.dtype = static_cast<Dtype>(dtype);
  call.kind = std::move(kind);
  call.elems = elems;
  call.buffer = reinterpret_cast<void*>(address);
  call.peer = peer < 0 ? kAnyRank : static_cast<uint32_t>(peer);
  call.tag = tag;
  call.site = call_site();
  call.timeout_s = timeout_s;
  call.asynchronous = asynchronous;
  call.device = std::move(device);
  call.stream = stream_of(stream);
  Unlocked unlocked;
  std::shared_ptr<Work> work = communicator.submit(call);
  if (!asynchronous) finish(*work, call.stream);
  return work;
}

// Where in the user's program this call stands; empty when no frame of it is known.
std::string site_text() {
  const CallSite* site = call_site();
  return site ? site->text : "";
}

// Of hosts with so many ranks each, with a tensor in the arena: what was taken for their levels and why, and
// for each size how a call would run.
using Row = std::tuple<std::string, std::string, std::string, double, std::string>;
std::tuple<std::string, std::vector<Row>> explain_hosts(const std::vector<uint32_t>& counts,
                                                        const std::optional<std::vector<uint32_t>>& wish,
                                                        const std::tuple<double, double>& speeds,
                                                        uint8_t operation, uint8_t dtype,
                                                        const std::vector<uint64_t>& sizes_elems) {
  std::vector<std::string> host_of_rank;
  for (size_t host = 0; host < counts.size(); ++host)
    host_of_rank.insert(host_of_rank.end(), counts[host], std::to_string(host));
  const Levels usual = levels_of(host_of_rank);
  const bool over_hosts = counts.size() > 1;
  const SlotSizes slots = sizes_for({}, usual.ranks(), over_hosts);
  const Speeds measured{std::get<0>(speeds), std::get<1>(speeds)};
  NetSizes net;
  net.latency_s = measured.latency_s;
  net.bytes_per_s = measured.bytes_per_s;
  const ListChoice choice = over_hosts ? list_for(usual, wish, measured, slots, net) : ListChoice{};
  std::vector<Row> rows;
  for (const uint64_t elems : sizes_elems) {
    const Call call{static_cast<Operation>(operation), static_cast<Dtype>(dtype), Reduction::sum, 0, elems};
    Levels levels = usual;
    if (!is_rounded_in_levels(call) || is_for(wish, usual)) levels.sizes = choice.sizes;
    check(levels);
    const Explanation how = explain(call, levels, 0, true, model_of(measured), slots, net);
    rows.emplace_back(name(how.algorithm), how.levels, how.kernels, how.seconds, how.reason);
  }
  return {over_hosts ? "levels " + print(choice.sizes) + " (" + choice.reason + ")" : "", rows};
}

}  // namespace
}  // namespace photinus

NB_MODULE(_native, m) {
  using namespace photinus;

  // Tensors in the arena that live in module globals are still there when the interpreter ends; that is no
  // mistake of the user's, so it deserves no report on the screen.
  nb::set_leak_warnings(false);

  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      // A signal's handler has set its own exception, which is the one to raise.
      if (error.kind() == ErrorKind::interrupted && PyErr_Occurred()) return;
      PyErr_SetString(python_class(error.kind()).ptr(), error.what());
    }
  });

  m.def("new_address", &new_address);
  m.def("explain_hosts", &explain_hosts, "counts"_a, "levels"_a.none(), "speeds"_a, "operation"_a, "dtype"_a,
        "sizes_elems"_a);
  m.def("listen", &photinus::listen, "addresses"_a);
  // `at`: "ip:port" each.
  m.def(
      "exchange_texts",
      [](uint32_t rank, uint32_t ranks, const std::string& address, const std::vector<std::string>& at,
         const std::string& host, const std::string& job, uint32_t attempt, double timeout_s,
         const std::string& own) {
        Meeting meeting{rank, ranks, address, {}, host, job, attempt, timeout_s};
        for (const std::string& each : at) meeting.at.push_back(with_port(each));
        Unlocked unlocked;
        return exchange_texts(*Network::of_this_process(), meeting, own);
      },
      "rank"_a, "ranks"_a, "address"_a, "at"_a, "host"_a, "job"_a, "attempt"_a, "timeout_s"_a, "own"_a);
  set_interrupt_check(signal_arrived);
  m.def("set_thread_check", [](const nb::object& check) {
    thread_check = nb::object(check).release().ptr();
    Progress::set_thread_check(has_other_threads);
  });
  // By the thread that ends the interpreter, before it leaves groups; and by those that it will join.
  m.def("begin_exit", [] { goes_on_at_exit = exiting = true; });
  // Of a process that would else exit with 0: an error that nobody has seen was printed.
  m.def("fail_at_exit", [] {
    on_exit(
        [](int status, void*) {
          std::fflush(nullptr);
          if (status == 0) _exit(1);
        },
        nullptr);
  });
  m.def("go_on_at_exit", [] { goes_on_at_exit = true; });
  m.def("set_label", &set_label, "label"_a);
  m.def("set_library_folders", &set_library_folders, "folders"_a, "named"_a);
  m.def("call_site", &site_text);
  m.def("usable_cores", &usable_cores);
  m.def("instruction_set", [] { return std::string(name(best_instruction_set())); });
  m.def("arena_used_bytes", [] { return Arena::of_this_process()->used_bytes(); });

  nb::dict dtypes, reductions, operations;
  for (uint8_t i = 0; i < kDtypeCount; ++i) dtypes[name(static_cast<Dtype>(i))] = i;
  for (uint8_t i = 0; i < kReductionCount; ++i) reductions[name(static_cast<Reduction>(i))] = i;
  for (uint8_t i = 0; i < kOperationCount; ++i) operations[name(static_cast<Operation>(i))] = i;
  m.attr("DTYPES") = dtypes;
  m.attr("REDUCTIONS") = reductions;
  m.attr("OPERATIONS") = operations;

  nb::class_<ArenaBuffer>(m, "ArenaBuffer", nb::type_slots(arena_buffer_slots))
      .def("__init__",
           [](ArenaBuffer* self, size_t bytes) { new (self) ArenaBuffer(Arena::of_this_process(), bytes); });

  nb::class_<cuda::CudaDevice>(m, "CudaDevice")
      .def_ro("index", &cuda::CudaDevice::index)
      .def_prop_ro("name", [](const cuda::CudaDevice& device) { return device.engines.gpu_name(); });
  m.def("cuda_device", &cuda::CudaDevice::of_this_process, "index"_a, nb::call_guard<Unlocked>());

  nb::class_<Work>(m, "Work")
      .def(
          "wait",
          [](Work& work, double timeout_s, bool sees) {
            Unlocked unlocked;
            wait_for(work, timeout_s, sees);
          },
          "timeout_s"_a = 0.0, "sees"_a = true)
      .def("see", &Work::see)
      .def("is_completed", &Work::is_completed)
      .def(
          "order", [](Work& work, uintptr_t stream) { work.order(stream_of(stream)); }, "stream"_a,
          nb::call_guard<Unlocked>())
      .def("has_landed", &Work::has_landed, nb::call_guard<Unlocked>())
      .def("error", &error_of, "sees"_a = true)
      .def("duration_s", &Work::duration_s)
      .def_prop_ro("source_rank", &Work::source_rank)
      .def_prop_ro("description", &Work::description);

  nb::class_<EndedWorks>(m, "EndedWorks")
      .def(nb::new_([] { return std::make_shared<EndedWorks>(); }))
      .def("put_when_ended", &EndedWorks::put_when_ended, "work"_a, "object"_a)
      .def("take", &EndedWorks::take, "idle_s"_a)
      .def("is_empty", &EndedWorks::is_empty)
      .def("close", &EndedWorks::close);

  // The engine's word for what a call and its circumstances are together; Python knows no other record.
  nb::class_<Submission>(m, "Call", kCallDoc)
      .def("__init__", &make_call, "operation"_a, "send"_a = 0, "recv"_a = 0, "elems"_a = 0, "dtype"_a = 0,
           "reduction"_a = 0, "root"_a = 0, "timeout_s"_a = 0.0, "asynchronous"_a = true, "factor"_a = 1.0,
           "label"_a = "", "updates"_a = 0, "wire_dtype"_a = nb::none(), "shape"_a = nb::none(),
           "sends"_a = nb::tuple(), "recvs"_a = nb::tuple(), "device"_a = nb::none(), "stream"_a = 0)
      .def_prop_ro("operation", [](const Submission& c) { return static_cast<uint8_t>(c.call.operation); })
      .def_ro("asynchronous", &Submission::asynchronous);

  nb::class_<OutsideWait>(m, "OutsideWait")
      .def("look", &OutsideWait::look, "missing"_a, "description"_a, nb::call_guard<Unlocked>());

  nb::class_<Communicator>(m, "Communicator")
      .def_static("connect", &photinus::connect, "rank"_a, "world_size"_a, "address"_a, "name"_a,
                  "timeout_s"_a, "grace_s"_a, "waiting_s"_a, "chunk_bytes"_a, "strict_sites"_a, "places"_a,
                  "job"_a, "attempt"_a, "levels"_a.none(), "speeds"_a)
      .def_prop_ro(
          "speeds",
          [](const Communicator& c) { return std::tuple(c.speeds().latency_s, c.speeds().bytes_per_s); })
      .def("under_way_s", &Communicator::under_way_s)
      .def_prop_ro("about_hosts", &Communicator::about_hosts)
      .def("submit", &submit, "call"_a, "keep"_a = nb::none())
      .def("run", &run, "call"_a)
      .def("message", &message, "operation"_a, "address"_a, "elems"_a, "dtype"_a, "peer"_a, "tag"_a,
           "timeout_s"_a, "asynchronous"_a, "keep"_a = nb::none(), "kind"_a = "", "device"_a = nb::none(),
           "stream"_a = 0)
      .def("wait_outside", &Communicator::wait_outside, "key"_a, "timeout_s"_a)
      .def("abort", &Communicator::abort, "reason"_a, nb::call_guard<Unlocked>())
      .def("set_reason", &Communicator::set_reason, "reason"_a)
      .def_prop_ro("has_failures", &Communicator::has_failures)
      .def("raise_lost", &raise_lost, "of_dropped"_a)
      .def("close", &Communicator::close, nb::call_guard<Unlocked>())
      .def("explain", [](const Communicator& communicator, uint8_t operation, uint64_t elems, uint8_t dtype,
                         bool in_arena) {
        return communicator.explain(
            {static_cast<Operation>(operation), static_cast<Dtype>(dtype), Reduction::sum, 0, elems},
            in_arena);
      });
}
