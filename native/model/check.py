"""Checks the models of the shared-memory protocol with spin, and that spin rejects each mutation of them.

    python native/model/check.py            all, one line each; exit status 1 if a model fails or a mutant survives
    python native/model/check.py staged     only the cases whose model or name contains a word

Needs spin (Debian: apt-get install spin) and a C compiler. Searches are exhaustive: no hashing of states, and a search
that hits a bound of depth or memory counts as failed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

HERE = Path(__file__).resolve().parent
MEMORY_MIB = 3500
DEPTH = 1_000_000
LIMIT_S = 200.0  # of each search; the longest takes a tenth of it on an idle machine


class Verdict(Enum):
    """How a search ended."""

    HOLDS = "holds"
    ASSERTION = "assertion violated"
    DEADLOCK = "invalid end state"
    CYCLE = "acceptance cycle"  # a run that goes on for ever without reaching the end
    UNFINISHED = "search not exhaustive"


@dataclass(frozen=True)
class Case:
    """A model, or a mutation of it, and how its search must end."""

    name: str  # what is claimed, or what goes wrong
    model: str
    defines: tuple[str, ...] = ()
    expect: Verdict = Verdict.HOLDS
    liveness: bool = False  # the model's ltl formula, without fairness, instead of assertions and deadlocks

    def __str__(self) -> str:
        return f"{self.model}: {self.name} [{' '.join(self.defines)}{' liveness' if self.liveness else ''}]"


@dataclass(frozen=True)
class Result:
    """What the search found, and its size."""

    verdict: Verdict
    states: int
    depth: int
    seconds: float
    output: str


def missing_tool() -> str | None:
    """What has to be installed, in one line; None if all is there."""
    if shutil.which("spin") is None:
        return "needs spin: apt-get install spin"
    if shutil.which("cc") is None:
        return "needs a C compiler: apt-get install gcc"
    return None


def run(case: Case) -> Result:
    """Makes the verifier of a case in a temporary directory and runs it."""
    defines = [f"-D{define}" for define in case.defines]
    kind = [] if case.liveness else ["-DSAFETY", "-DNOCLAIM"]
    with tempfile.TemporaryDirectory(prefix="photinus-model-") as made:
        directory = Path(made)
        _tool(["spin", "-a", *defines, str(HERE / f"{case.model}.pml")], directory)
        memory = f"-DMEMLIM={MEMORY_MIB}"
        _tool(["cc", "-O2", "-w", "-DCOLLAPSE", memory, *kind, "-o", "pan", "pan.c"], directory)
        start = time.monotonic()
        search = ["./pan", f"-m{DEPTH}", *(["-a"] if case.liveness else [])]
        if case.expect is Verdict.ASSERTION:
            search.append("-E")  # a mutation that also deadlocks must be seen to do what it is said to do
        try:
            output = subprocess.run(search, cwd=directory, capture_output=True, text=True, timeout=LIMIT_S).stdout
        except subprocess.TimeoutExpired:
            output = f"the search took more than {LIMIT_S:.0f} s"
        seconds = time.monotonic() - start
    return Result(_verdict(output), _number(r"(\d+) states, stored", output), _number(r"depth reached (\d+)", output),
                  seconds, output)  # fmt: skip


def _tool(command: list[str], directory: Path) -> None:
    ended = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=LIMIT_S)
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{ended.stdout}{ended.stderr}")


def _verdict(output: str) -> Verdict:
    for verdict in (Verdict.ASSERTION, Verdict.DEADLOCK, Verdict.CYCLE):
        if re.search(rf"^pan:\d+: {verdict.value}", output, re.MULTILINE):
            return verdict
    complete = "errors: 0" in output and not re.search(
        r"Search not completed|search depth too small|out of memory", output
    )
    return Verdict.HOLDS if complete else Verdict.UNFINISHED


def _number(pattern: str, output: str) -> int:
    found = re.search(pattern, output)
    return int(found[1]) if found else 0


def _ranks(count: int, *more: str) -> tuple[str, ...]:
    return (f"RANKS={count}", *more)


LINKED = _ranks(2, "DIRECT", "DATA", "CALLS=2")  # of links.pml


def _models() -> list[Case]:
    cases = [
        Case("no wake-up is lost between two ranks", "sleep", _ranks(2)),
        Case("no wake-up is lost between three ranks", "sleep", _ranks(3, "ROUNDS=2")),
        Case("two ranks end, and spin for nothing", "sleep", _ranks(2), liveness=True),
        Case("three ranks end, and spin for nothing", "sleep", _ranks(3, "ROUNDS=2"), liveness=True),
    ]
    for users in (1, 2):
        who = f"a progress thread and {users} that wait{'s' if users == 1 else ''}"
        defines = (f"USERS={users}",)
        cases.append(Case(f"no wake-up is lost between {who}", "lane", defines))
        cases.append(Case(f"{who} end, and spin for nothing", "lane", defines, liveness=True))
    for ranks in (2, 3):
        who = f"{ranks} ranks"
        cases += [
            Case(f"{who} read no other call's descriptor or slot and agree on mismatches", "meeting", _ranks(ranks)),
            Case(f"{who} end all calls", "meeting", _ranks(ranks), liveness=True),
            Case(f"{who} read the chunks they expect, 3 slots", "staged", _ranks(ranks, "CHUNKS=6")),
            Case(f"{who} read the chunks they expect, 4 slots", "staged", _ranks(ranks, "CHUNKS=6", "SLOTS=4")),
            Case(f"{who} read the chunks they expect, one line at the end", "staged", _ranks(ranks, "TAIL=1")),
            Case(f"{who} meet no slot of the call before", "staged", _ranks(ranks, "CHUNKS=4", "CALLS=2")),
            Case(f"{who} end all chunks", "staged", _ranks(ranks), liveness=True),
            Case(f"{who} return from all_reduce when all have written", "arena", _ranks(ranks)),
            Case(f"{who} end all_reduce", "arena", _ranks(ranks), liveness=True),
            Case(f"{who}: the root of a broadcast returns when all have read", "arena", _ranks(ranks, "BROADCAST")),
        ]
    cases += [
        Case("leaving after the last call fails nobody, 2 ranks", "failure", _ranks(2)),
        Case("leaving after the last call fails nobody, 3 ranks", "failure", _ranks(3, "CALLS=1")),
        Case("the survivor of 2 ranks names the dead", "failure", _ranks(2, "DEATH")),
        Case("the survivors of 3 ranks name the dead", "failure", _ranks(3, "CALLS=1", "DEATH")),
        Case("the survivor of 2 ranks ends", "failure", _ranks(2, "DEATH"), liveness=True),
        Case("4 hosts in two levels agree on a mismatch and go on", "levels", _ranks(4, "CALLS=3", "MIXED=1")),
        Case("4 hosts in two levels agree on mismatches in two calls", "levels", _ranks(4)),
        Case("4 hosts in two levels, long frames", "levels", _ranks(4, "MIXED=1", "UNBUFFERED")),
        Case("4 hosts in two levels, small frames", "levels", _ranks(4, "MIXED=1", "TOGETHER")),
        Case("4 hosts in two levels, larger frames", "levels", _ranks(4, "MIXED=1", "AHEAD")),
        Case(
            "4 hosts in two levels, long frames behind what is told",
            "levels",
            _ranks(4, "MIXED=1", "AHEAD", "UNBUFFERED"),
        ),
        Case("3 hosts in one level agree on mismatches", "levels", _ranks(3, "DIRECT")),
        Case("3 hosts in one level, larger frames", "levels", _ranks(3, "DIRECT", "AHEAD", "CALLS=3")),
        Case("3 hosts in one level, small frames", "levels", _ranks(3, "DIRECT", "TOGETHER", "CALLS=3")),
        Case("2 hosts end all calls", "levels", _ranks(2, "DIRECT"), liveness=True),
        Case("leaving over a link fails nobody", "links", LINKED),
        Case("the survivor of 2 hosts ends with a result or an error", "links", (*LINKED, "DEATH")),
        Case("the survivor of 2 hosts ends", "links", (*LINKED, "DEATH"), liveness=True),
    ]
    return cases


def _mutations() -> list[Case]:
    assertion, deadlock, cycle = Verdict.ASSERTION, Verdict.DEADLOCK, Verdict.CYCLE
    death = _ranks(3, "CALLS=1", "DEATH")
    mixed = _ranks(4, "MIXED=1")
    return [
        Case("futexes looked at before the counter is written", "sleep", ("BUG_WAKE_BEFORE_STORE",), deadlock),
        Case("no futex woken", "sleep", ("BUG_NO_WAKE",), deadlock),
        Case("no look between announcing and sleeping", "sleep", ("BUG_NO_RECHECK",), deadlock),
        Case("futex read after the last look", "sleep", ("BUG_FUTEX_READ_LATE",), deadlock),
        Case("sleep announced after the last look", "sleep", ("BUG_ANNOUNCED_LATE",), deadlock),
        Case("no wake-up after unlocking", "lane", ("BUG_NO_WAKE_AFTER_UNLOCK",), deadlock),
        Case("no wake-up by who completes", "lane", ("BUG_NO_WAKE_AT_END",), deadlock),
        Case("no wake-up by who submits", "lane", ("BUG_NO_WAKE_ON_SUBMIT",), deadlock),
        Case("no wake-up by a waiter that gives up", "lane", ("BUG_NO_WAKE_ON_LEAVING",), deadlock),
        Case("a wake-up reaches one thread", "lane", ("BUG_WAKE_ONE",), deadlock),
        Case("waiters counted after trying the lock", "lane", ("BUG_COUNTED_LATE",), deadlock),
        Case("asleep is a flag, not a count", "lane", ("BUG_ASLEEP_IS_A_FLAG",), deadlock),
        Case("a waiter that drove wakes itself for ever", "lane", ("BUG_WAITER_WAKES_ITSELF",), cycle, True),
        Case("one flat slot", "meeting", ("BUG_ONE_FLAT_SLOT",), assertion),
        Case("one descriptor", "meeting", ("BUG_ONE_DESCRIPTOR",), assertion),
        Case("waiting for the very number", "meeting", ("BUG_EXACT_COUNTER",), deadlock),
        Case("posted before the descriptor is written", "meeting", ("BUG_POSTED_BEFORE_WRITTEN",), assertion),
        Case("flat slot written after posting", "meeting", ("BUG_FLAT_AFTER_POSTING",), assertion),
        Case("no meeting", "meeting", ("BUG_NO_MEETING",), assertion),
        Case("only neighbours compared", "meeting", _ranks(3, "BUG_NEIGHBOURS_COMPARED"), assertion),
        Case("no wait on finished", "staged", ("BUG_NO_FINISH_WAIT",), assertion),
        Case("no wait on finished, 4 slots", "staged", ("BUG_NO_FINISH_WAIT", "SLOTS=4", "CHUNKS=6"), assertion),
        Case("wait on finished one chunk too early", "staged", ("BUG_FINISH_WAIT_ONE_EARLY",), assertion),
        Case("no wait on staged", "staged", ("BUG_NO_STAGED_WAIT",), assertion),
        Case("no wait on reduced", "staged", ("BUG_NO_REDUCED_WAIT",), assertion),
        Case("2 slots", "staged", ("SLOTS=2",), deadlock),
        Case("1 slot", "staged", ("SLOTS=1",), deadlock),
        Case("1 slot, no wait on finished", "staged", ("SLOTS=1", "BUG_NO_FINISH_WAIT"), assertion),
        Case("counters without the call's number", "staged", ("CALLS=2", "BUG_NO_EPOCH"), assertion),
        Case("no meeting", "staged", ("CALLS=2", "CHUNKS=4", "BUG_NO_MEETING"), assertion),
        Case("all_reduce without the last wait", "arena", ("BUG_NO_FINISH_WAIT",), assertion),
        Case("broadcast without the last wait", "arena", ("BROADCAST", "BUG_NO_FINISH_WAIT"), assertion),
        Case("no meeting", "arena", ("BUG_NO_MEETING",), assertion),
        Case("no second look at the counters", "failure", _ranks(2, "BUG_NO_SECOND_LOOK"), assertion),
        Case("presence read before the loss", "failure", (*death, "BUG_PRESENCE_BEFORE_LOSS"), assertion),
        Case("presence written before the reason", "failure", (*death, "BUG_PRESENCE_BEFORE_REASON"), assertion),
        Case("a loss wakes nobody", "failure", _ranks(2, "DEATH", "BUG_WATCH_DOES_NOT_WAKE"), deadlock),
        Case("more than promised: errors begin with the dead rank", "failure", (*death, "DEAD_RANK_FIRST"), assertion),
        Case("nothing is forgotten", "levels", (*mixed, "BUG_NO_FORGET"), deadlock),
        Case("the channel's number stays", "levels", (*mixed, "BUG_CHANNEL_KEPT"), deadlock),
        Case("output written before the last hearing", "levels", (*mixed, "BUG_OUTPUT_BEFORE_HEARD"), assertion),
        Case("one place for tells", "levels", (*mixed, "BUG_ONE_PLACE_FOR_TELLS"), assertion),
        Case("one place for small frames", "levels", (*_ranks(3, "DIRECT", "TOGETHER"), "BUG_ONE_PLACE_FOR_CARRIED"),
             deadlock),
        Case("places posted before hearing", "levels", (*mixed, "BUG_POSTED_BEFORE_HEARD"), assertion),
        Case("who waits for a frame does not meet ahead", "levels", (*mixed, "BUG_NO_MEETING_AHEAD"), deadlock),
        Case("frames without the call's number, channel stays", "levels",
             (*mixed, "BUG_CHANNEL_KEPT", "BUG_NO_NUMBER"), assertion),
        Case("only the own call is told", "levels", (*mixed, "BUG_OWN_CALL_TOLD_ONLY"), assertion),
        Case("who finds a mismatch tells no more", "levels", (*mixed, "BUG_RAISED_AT_ONCE"), deadlock),
        Case("long frames must leave before hearing", "levels",
             (*mixed, "UNBUFFERED", "BUG_SENT_BEFORE_HEARD"), deadlock),
        Case("news of a death is not passed on", "links",
             _ranks(4, "DEATH", "STAY", "BUG_NEWS_NOT_PASSED_ON"), deadlock),
        Case("no second look at what has come", "links", (*LINKED, "BUG_NO_SECOND_LOOK"), assertion),
        Case("one stream's goodbye is enough", "links", (*LINKED, "BUG_ONE_GOODBYE"), assertion),
        Case("who leaves does not wait for delivery", "links", (*LINKED, "BUG_CLOSED_AT_ONCE"), assertion),
    ]  # fmt: skip


CASES = [*_models(), *_mutations()]


def main(words: list[str]) -> int:
    """Runs the cases that contain one of `words` (all without words)."""
    if lack := missing_tool():
        print(lack)
        return 1
    failed = 0
    for case in CASES:
        if words and not any(word in str(case) for word in words):
            continue
        result = run(case)
        good = result.verdict is case.expect
        failed += not good
        print(
            f"{'ok  ' if good else 'FAIL'} {result.states:>9} states  depth {result.depth:>5}  "
            f"{result.seconds:5.1f} s  {result.verdict.value:<18} {case}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
