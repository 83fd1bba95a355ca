"""Shows that each wait on the way of CUDA tensors is tested: without any one of them a test fails.

    python native/tests/cuda_waits.py build/module/native build/apart           all; exit status 1 if a test passes
                                                                                without a wait
    python native/tests/cuda_waits.py build/module/native build/apart rings     only those whose file or name contains
                                                                                the word

Takes the native build whose test programs are up to date (`make native`), and the engine whose files were compiled one
by one (`make apart`); compiles a file without one of its waits, and links the programs with that instead. None of them
takes a minute; one that does not end has failed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent
LIMIT_S = 180.0  # of a program; without a wait it may hang
ENGINES, DEVICE, COPIES = "device/cuda/copy_engines.cc", "device/cuda/cuda_device.cc", "engine/device_copies.cc"
RINGS, ON_HOST, PLANS = "engine/device_rings.cc", "engine/host_tensors.cc", "collectives/device_plans.cc"
COLLECTIVE, MESSAGE, EXECUTOR = "engine/collective.cc", "engine/message.cc", "engine/executor.cc"


@dataclass(frozen=True)
class Wait:
    """One wait: the text that is it, the text without it, and the test programs of which one must fail then."""

    name: str
    file: str
    text: str
    without: str
    programs: tuple[str, ...]


def _waits() -> list[Wait]:
    alone, errors = ("cuda_test",), ("cuda_errors_test",)
    ranks, faults, plans = ("cuda_operations_test",), ("cuda_failures_test",), ("plans_test",)
    found = [
        Wait("copies for the caller's stream", ENGINES,
             "gpu_->call(gpu_->driver().cuStreamWaitEvent, engines_[index_of(way)].stream, event.get(), 0);",
             "", alone),
        Wait("the caller's stream for copies", ENGINES,
             "gpu_->call(gpu_->driver().cuStreamWaitEvent, caller, event.get(), 0);", "", alone),
        Wait("for a landing", ENGINES, "if (engine.has_landed(ticket >> 1)) return true;", "return true;", alone),
        Wait("for a landing, by the driver", ENGINES,
             "  return result == CUDA_SUCCESS;\n}", "  return true;\n}", alone),
        Wait("for a copy that may have failed", ENGINES, "    return poll(ticket);", "    return true;", ranks),
        Wait("of a device that ends for its copies", ENGINES,
             "idle &= !engine.stream || settle(engine, kSettle_s);", "", errors),
        Wait("of memory that is unlocked for its copies", ENGINES,
             "if (!settle(engine, kSettle_s)) return;", "", ranks),
        Wait("for a copy whose beginning failed", ENGINES, "if (settle(engine, kSettle_s)) {", "if (true) {", errors),
        Wait("for all copies of a way", ENGINES,
             "if (result == CUDA_SUCCESS || gpu_->is_dead()) return true;", "return true;", errors),
        Wait("for the copy before in a block", DEVICE,
             " || (block.ticket != 0 && !engines.has_ended(block.ticket))", "", ranks),
        Wait("of an operation for what is in the caller's stream", COPIES,
             "if (begin_) device_->engines.wait_for(begin_, way);", "", ranks),
        Wait("of an operation for copies to the host", COPIES,
             " && device_->engines.poll(to_host_.front())", "", ranks),
        Wait("the place behind copies to the GPU", COPIES, "end_ = device_->engines.record(Way::to_gpu);", ";", ranks),
        Wait("for copies of a work that is waited for no more", COPIES,
             "return ticket == 0 || device_->engines.has_ended(ticket);", "return true;", ranks),
        Wait("for copies of an operation that failed", COPIES, "while (!has_landed()) {", "while (false) {", faults),
        Wait("of a stream for a work", COPIES, "if (end_) device_->engines.make_wait(stream, end_);", "", ranks),
        Wait("for room of one rank's", RINGS,
             "return peers_->value(rank, Counter::returned) + sizes_.chunks > first_ + chunk;", "return true;", ranks),
        Wait("for copies from a result", RINGS,
             "if (ticket != 0 && device_ && !device_->engines.poll(ticket)) break;", "", ranks),
        Wait("for a piece in a block", ON_HOST,
             "!flights_.empty() && copies_.have_come(came_ + 1)", "!flights_.empty()", ranks),
        Wait("for all pieces", ON_HOST,
             "if (!flights_.empty() || next_ < tensors_.size()) return false;", "", ranks),
        Wait("for a block to bring", COLLECTIVE,
             "if (!host_tensors_->bring(moved)) return moved ? Poll::moved : Poll::blocked;",
             "host_tensors_->bring(moved);", ranks),
        Wait("for a block to give back", COLLECTIVE,
             "if (host_tensors_ && !host_tensors_->give_back(moved)) return false;",
             "if (host_tensors_) host_tensors_->give_back(moved);", ranks),
        Wait("of a collective that failed", COLLECTIVE,
             "if (copies_ && !copies_->settle(kSettle_s) && !host_tensors_) {", "if (false) {", faults),
        Wait("for a message's tensor", MESSAGE,
             "if (!host_tensors_->bring(moved)) return moved ? Poll::moved : Poll::blocked;",
             "host_tensors_->bring(moved);", ranks),
        Wait("for a block of a message", MESSAGE,
             "if (host_tensors_->give_back(moved)) {", "if (host_tensors_->give_back(moved) || true) {", ranks),
        Wait("of a message that failed", MESSAGE, "if (copies_) copies_->settle(kSettle_s);", "", faults),
        Wait("of a step for copies to the host", EXECUTOR,
             "if (!memory.copies->have_come(step.value)) return false;", "", ranks),
        Wait("of a step for room", EXECUTOR,
             "if (step.rank == kEveryone ? !memory.rings->has_room(step.value)\n"
             "                                   : !memory.rings->has_room(step.rank, step.value))\n"
             "          return false;", "", ranks),
        Wait("of a result for its copy", EXECUTOR, "memory.copies->newest(cuda::Way::to_gpu)", "0", ranks),
        Wait("for those who help to add", "kernels/reduce_threads.cc",
             "done_.wait(lock, [this] { return busy_ == 0; });", "", ranks),
    ]  # fmt: skip
    # Every line of a plan that waits, by its place.
    source = (NATIVE / PLANS).read_text()
    for number, line in enumerate(source.splitlines(), 1):
        if "steps.push_back(wait_" in line:
            call = line[line.index("steps.push_back(wait_") :]
            found.append(Wait(f"line {number}: {call.strip()}", PLANS, line, line.replace(call, ";"), plans))
    return found


def _mutant(wait: Wait, folder: Path) -> Path:
    """The file without the wait, compiled. Raises RuntimeError when the wait is not there, or stands there twice."""
    lines = (NATIVE / wait.file).read_text()
    if wait.name.startswith("line "):  # equal lines may stand in several plans
        number = int(wait.name.split()[1].rstrip(":")) - 1
        all_lines = lines.splitlines(keepends=True)
        all_lines[number] = all_lines[number].replace(wait.text, wait.without)
        changed = "".join(all_lines)
    else:
        if lines.count(wait.text) != 1:
            raise RuntimeError(f"{wait.file} has {lines.count(wait.text)} times, not once: {wait.text}")
        changed = lines.replace(wait.text, wait.without)
    source, compiled = folder / "mutant.cc", folder / "mutant.o"
    source.write_text(changed)
    words = ["c++", "-std=gnu++20", "-O1", "-ffp-contract=off", "-w", f"-I{NATIVE}", "-c", str(source)]
    subprocess.run([*words, "-o", str(compiled)], check=True)
    return compiled


def _failure(program: str, build: Path, engine: Path, folder: Path, instead: list[Path]) -> str | None:
    """The test that fails in a program linked with these objects instead of the engine's own; None: all pass."""
    linked = folder / program
    test = build / "tests" / "CMakeFiles" / f"{program}.dir" / f"{program}.cc.o"
    libraries = [build / "tests" / "libphotinus_testing.a", engine]
    words = ["c++", "-pthread", "-o", str(linked), *map(str, (*instead, test, *libraries)), "-ldl"]
    subprocess.run(words, check=True)
    with open(folder / "output", "w+b") as output:
        try:
            passed = subprocess.run([linked], stdout=output, stderr=subprocess.DEVNULL, timeout=LIMIT_S).returncode == 0
        except subprocess.TimeoutExpired:
            passed = False
        output.seek(0)
        lines = output.read().decode().splitlines()
    return None if passed else f"{program}: {lines[-1] if lines else 'nothing'}"


def main() -> int:
    """Tries all waits, or those that the words name."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    build, engine = Path(sys.argv[1]), Path(sys.argv[2]) / "libphotinus_engine.a"
    words = sys.argv[3:]
    chosen = [wait for wait in _waits() if not words or any(word in f"{wait.file} {wait.name}" for word in words)]
    untested = 0
    with tempfile.TemporaryDirectory(prefix="photinus-waits-") as name:
        folder = Path(name)
        for program in sorted({program for wait in chosen for program in wait.programs}):
            if failure := _failure(program, build, engine, folder, []):
                sys.exit(f"with all waits in place fails {failure}")
        for wait in chosen:
            began = time.monotonic()
            mutant = _mutant(wait, folder)
            failures = (_failure(program, build, engine, folder, [mutant]) for program in wait.programs)
            failure = next((each for each in failures if each), None)
            untested += failure is None
            said = failure or "NO TEST FAILS"
            print(f"{wait.file}, {wait.name}: {said} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen)} waits, {untested} without a test")
    return int(untested > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main())
