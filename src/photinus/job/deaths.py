"""Find the first cause among the deaths of workers, and describe it. Pure functions over plain records.

When one rank dies, the others fail within milliseconds because they miss it. Blame goes to the first death that is
not such a consequence:

    1. a rank that says itself that it lost a peer (or timed out waiting for one) is a consequence;
    2. SIGABRT comes after the rest at equal times: gloo ends a process so when a peer vanishes at a bad moment;
    3. among what is left, the earliest; a rank killed by SIGKILL counts half a second earlier than it was seen dead,
       since the kernel closes its sockets, which the others notice, before it reports the death.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import HAD_NO_ERROR
from .world import name_ranks

# More would push the headline off the screen.
_TRACEBACK_LINES = 120
_LINE_CHARACTERS = 200

# By name: the launcher imports neither torch nor the engine, and a worker can only write a name.
_LOST_PEER_TYPES = frozenset(
    {
        "AbortedError",
        "CollectiveTimeoutError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "PeerLostError",
    }
)
# gloo, NCCL and the store raise plain RuntimeErrors, which only their texts tell apart.
_LOST_PEER_TEXTS = (
    "broken pipe",
    "connection closed by peer",
    "connection refused",
    "connection reset by peer",
    "connection was likely closed",
    "connectfullmesh failed",
    "failed to recv, got 0 bytes",
    HAD_NO_ERROR,
    "ncclremoteerror",
    "read error [",
    "timed out waiting",
    "write error [",
)
_KILL_IS_SEEN_LATE_S = 0.5


@dataclass(frozen=True)
class Raised:
    """A worker's record of its uncaught exception (see `worker.describe`).

    Attributes:
        chain: (type name, text) of the exception and of what it was raised from or during.
        traceback: as Python prints it, empty for sys.exit.
        exit_code: the code that the worker will leave with.
        raised_at_s: monotonic clock of the worker's host; None when another writer did not say.
        place: FILE:LINE that raised it; empty when that is not known.
        by: who raised each of `chain`: torch, photinus or other; empty when another writer did not say.
    """

    chain: tuple[tuple[str, str], ...]
    traceback: str
    exit_code: int = 1
    raised_at_s: float | None = None
    place: str = ""
    by: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> Raised | None:
        """Reads the error file of a worker, ours or one written by torch's `@record`; None when it is neither."""
        try:
            data: Any = json.loads(text)
            message = data["message"]
            traceback = str(message["extraInfo"].get("py_callstack", ""))
            own = data.get("photinus")
            # torch's own @record wrote it, with neither the chain nor an exit code.
            if own is None:
                type_name, _, explanation = str(message["message"]).partition(": ")
                return cls(((type_name, explanation),), traceback)
            chain = tuple((str(name), str(explanation)) for name, explanation in own["chain"])
            facts = int(own["exit_code"]), float(own["raised_at_s"]), str(own["place"]), tuple(map(str, own["by"]))
            return cls(chain, traceback, *facts) if chain else None
        except (ValueError, TypeError, KeyError, AttributeError):  # half-written by a worker that was then killed
            return None

    @property
    def type_name(self) -> str:
        """Name of the exception's class."""
        return self.chain[0][0]

    @property
    def text(self) -> str:
        """The exception's own words."""
        return self.chain[0][1]

    @property
    def suspended(self) -> bool:
        """Return whether the worker saved its work and exited (`photinus.Suspended`), which is not a failure."""
        return self.type_name == "Suspended"

    @property
    def lost_a_child(self) -> bool:
        """Return whether its text, from torch's DataLoader, reports that a process of the worker was killed."""
        # The process that was killed is no rank of ours, so this text is all that is known of it.
        signs = ("killed by signal", "exited unexpectedly")
        return self.by[:1] in ((), ("torch",)) and any(sign in self.text for sign in signs)

    @property
    def lost_a_peer(self) -> bool:
        """Return whether the exception, or one of its causes, reports a lost rank.

        What neither torch nor Photinus raised is about sockets and pipes that the script had opened itself.
        """
        return any(
            name in _LOST_PEER_TYPES
            # Python puts [Errno N] before errors of sockets that it opened itself; torch and gloo do not.
            or (not text.startswith("[Errno ") and any(sign in text.lower() for sign in _LOST_PEER_TEXTS))
            for (name, text), by in zip(self.chain, self.by or ("torch",) * len(self.chain), strict=False)
            if by != "other"
        )


@dataclass(frozen=True)
class Death:
    """The end of one worker that did not simply finish.

    Attributes:
        status: exit code, or minus the signal that ended it.
        seen_at_s: monotonic time at which the launcher saw the end.
        lived_s: seconds from its start to then.
        raised: its uncaught exception or sys.exit, if it wrote one down.
        ended_by_us: it was running well when the launcher ended it.
        fault_stack: Python stack left by a fatal signal.
        overdue_s: it raised and then did not leave for so many seconds, until the launcher killed it.
        last_lines: what it wrote last, as far as that came through the launcher.
        log: path of the file with what it said, empty when there is none.
        gpu: the name of the GPU that it was given, empty for none.
    """

    rank: int
    local_rank: int
    pid: int
    host: str
    status: int
    seen_at_s: float
    lived_s: float
    raised: Raised | None = None
    ended_by_us: bool = False
    fault_stack: str = ""
    overdue_s: float | None = None
    last_lines: tuple[str, ...] = ()
    log: str = ""
    gpu: str = ""

    @property
    def consequence(self) -> bool:
        """Return whether it died only because another did."""
        return self.ended_by_us or (self.raised is not None and self.raised.lost_a_peer)

    @property
    def suspended(self) -> bool:
        """Return whether it saved its work and exited on request."""
        return self.raised is not None and self.raised.suspended

    @property
    def is_own(self) -> bool:
        """Return whether it failed by itself, perhaps in the moment in which the launcher ended it."""
        if self.raised is not None and (self.suspended or (self.raised.lost_a_peer and not self.is_faulty)):
            return False
        return not self.ended_by_us or bool(_stack(self).strip())

    @property
    def is_faulty(self) -> bool:
        """Return whether an audit found that the worker may compute wrong, whatever its script raised after that."""
        return self.raised is not None and any(name == "FaultyHardwareError" for name, _ in self.raised.chain)

    @property
    def _since_s(self) -> float:
        if self.raised is not None and self.raised.raised_at_s is not None:
            # A rank may take seconds to exit after it raised; another one, which missed it, may be seen dead before.
            return min(self.seen_at_s, self.raised.raised_at_s)
        return self.seen_at_s - (_KILL_IS_SEEN_LATE_S if self.status == -signal.SIGKILL else 0.0)


def describe_end(status: int) -> str:
    """Return `exited with code 3`, or `was killed by SIGKILL` for minus the number of a signal."""
    if status >= 0:
        return f"exited with code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-status}"


def root_cause(deaths: Sequence[Death]) -> Death:
    """The death that the others follow from; `deaths` must not be empty."""
    # False sorts first. Who the launcher ended is never the cause. The rank only makes the choice the same each time.
    return min(deaths, key=lambda d: (d.ended_by_us, d.consequence, d._since_s, d.status == -signal.SIGABRT, d.rank))


def exit_code_of(death: Death) -> int:
    """Return the launcher's exit code for this cause: 128 + signal, the worker's own code, 1 for an exception."""
    if death.raised is not None:  # however it went on from there
        return death.raised.exit_code
    # As a shell does, so that scripts around the launcher see what they would see around the worker.
    return 128 - death.status if death.status < 0 else death.status


def signature(death: Death) -> tuple[str, str, int]:
    """Equal for two deaths of the same kind, whichever rank and attempt."""
    if death.raised is not None:
        # Without the traceback, which may differ where the fault does not.
        return (death.raised.type_name, death.raised.text, death.raised.exit_code)
    return ("", "", death.status)


def ended_by_suspension(deaths: Sequence[Death]) -> bool:
    """Return whether these workers suspended themselves, and none failed."""
    return any(death.suspended for death in deaths) and all(death.suspended or death.ended_by_us for death in deaths)


def failure_text(
    deaths: Sequence[Death],
    *,
    finished: Sequence[int],
    attempt: int,
    next_step: str,
    oom: str = "",
    seen_before: bool = False,
) -> str:
    """The block that the launcher prints when an attempt has failed.

    Args:
        deaths: the ends of all ranks that did not finish well; not empty.
        finished: the ranks that had ended with exit code 0.
        attempt: 0 for the first start.
        next_step: last line: what the launcher does now.
        oom: out-of-memory kills during the attempt, in words; without them memory is not mentioned.
        seen_before: the same failure was shown for the attempt before; leaves out its traceback.
    """
    cause = root_cause(deaths)
    on = f" ({cause.gpu})" if cause.gpu else ""
    where = f"local rank {cause.local_rank}{on} of host {cause.host}, attempt {attempt}"
    lines = [_headline(cause), f"  {where}, {cause.lived_s:.1f} s after its start"]
    lines += [f"  {line}" for line in _details(cause, oom)]
    trace = _stack(cause)
    block = ["", *(f"photinus: {line}" for line in lines)]
    if _last_lines_explain(cause):
        block += ["photinus:   its last output:", "", *(f"    {line}" for line in cause.last_lines), ""]
    if trace.strip():
        # A job that fails alike at each restart would fill the screen with one traceback.
        if seen_before:
            block.append("photinus:   (traceback as above)")
        else:
            block += ["", *(f"    {line}".rstrip() for line in _shorten(trace.rstrip().splitlines())), ""]
    block += [f"photinus: {line}" for line in _others(cause, deaths, finished)]
    block.append(f"photinus: {next_step}")
    return "\n".join(block) + "\n"


def exit_message(death: Death) -> str:
    """Return the last lines of a worker's log file: the traceback that it did not print, or the way it ended."""
    stack = _stack(death).rstrip()
    # A reader of one log file does not see the others, and would take this end for the fault.
    end = f"photinus: rank {death.rank} (pid {death.pid}) was ended by the launcher because another rank failed"
    if death.raised is not None and stack:
        return f"{stack}\n"
    if not death.ended_by_us:
        end = f"photinus: {_headline(death)}"
    return f"{stack}\n{end}\n" if stack else f"{end}\n"


def _stack(death: Death) -> str:
    return death.raised.traceback if death.raised is not None else death.fault_stack


def _last_lines_explain(death: Death) -> bool:
    """Return whether the last lines of a worker explain more than its exception does."""
    if death.raised is not None and death.raised.traceback.strip():
        return False
    # Scripts often print what they raise or exit with.
    text = "" if death.raised is None else death.raised.text
    return any(line.strip() not in text for line in death.last_lines)


def _headline(death: Death) -> str:
    who = f"rank {death.rank} (pid {death.pid})"
    if death.raised is not None:
        return f"{who} {_raised_text(death.raised)}"
    return f"{who} {describe_end(death.status)}"


def _raised_text(raised: Raised) -> str:
    # sys.exit is no exception to its user: its class would only puzzle.
    if raised.type_name == "SystemExit":
        words = f": {_one_line(raised.text)}" if raised.text != str(raised.exit_code) else ""
        return f"exited with code {raised.exit_code}{words}"
    return f"raised {raised.type_name}: {_one_line(raised.text)}" if raised.text else f"raised {raised.type_name}"


def _details(cause: Death, oom: str) -> list[str]:
    lines = []
    if cause.overdue_s is not None:
        lines.append(f"it did not exit within {cause.overdue_s:.0f} s and was killed")
    child_killed = cause.raised is not None and cause.raised.lost_a_child
    # The kernel kills by SIGKILL only, and the launcher itself kills so what is overdue.
    killed = (cause.status == -signal.SIGKILL and cause.overdue_s is None) or child_killed
    if killed and oom:
        lines.append(f"possibly the kernel's out-of-memory killer: {oom}")
    if cause.status == -signal.SIGTERM and cause.raised is None:
        # Else a user would look for the reason in the launcher, and not at the scheduler or the person who sent it.
        lines.append("the launcher did not send it")
    if cause.log:
        lines.append(f"its log is {cause.log}")
    return lines


def _others(cause: Death, deaths: Sequence[Death], finished: Sequence[int]) -> list[str]:
    rest = sorted((death for death in deaths if death is not cause), key=lambda death: death.rank)
    own = [(d, d.raised.text) for d in rest if d.raised is not None and not d.ended_by_us]
    same = [d.rank for d, _ in own if signature(d) == signature(cause)]
    # A missing file or a bug hits all ranks alike: one line is enough for them.
    lines = [f"the same on {name_ranks(same, 8)}"] if same else []
    # Their errors name this cause, which is said above.
    consequences = [d.rank for d, text in own if d.consequence and f"rank {cause.rank} (" in text]
    lines += [f"{name_ranks(consequences, 8)} failed as a consequence"] if consequences else []
    for death in rest:
        if death.ended_by_us or death.rank in (*same, *consequences):
            continue
        words = _headline(death)
        if death.consequence and death.raised is not None:
            reason = f"{death.raised.type_name}: {_first_sentence(death.raised.text)}"
            words = f"rank {death.rank} (pid {death.pid}) failed as a consequence: {reason}"
        # See rule 2 above: gloo may abort a rank whose peer vanishes. It may have aborted by itself as well.
        elif death.status == -signal.SIGABRT:
            words += ", probably as a consequence"
        else:
            words = f"also, {words}"
        lines.append(words)
    killed = [death.rank for death in rest if death.ended_by_us and death.status == -signal.SIGKILL]
    ended = [death.rank for death in rest if death.ended_by_us and death.status != -signal.SIGKILL]
    if ended:
        lines.append(f"{name_ranks(ended, 8)} ended by the launcher")
    if killed:
        lines.append(f"{name_ranks(killed, 8)} did not exit in time: killed by the launcher")
    # No death explains the others: a rank that ended early with code 0 may be what they miss.
    if finished and cause.consequence:
        lines.append(f"{name_ranks(finished, 8)} finished with exit code 0 before")
    return lines


def _one_line(text: str) -> str:
    first = " ".join(text.split())
    return first if len(first) <= _LINE_CHARACTERS else first[: _LINE_CHARACTERS - 4] + " ..."


def _first_sentence(text: str) -> str:
    """Enough of a consequence to recognise it: without the place in gloo's sources and advice to look elsewhere."""
    sentence = re.split(r"(?<=[^.])\.\s", _one_line(re.sub(r"^\[\S+\.\w+:\d+\]\s*", "", text)), maxsplit=1)[0]
    return sentence if len(sentence) <= 120 else sentence[:116] + " ..."


def _shorten(lines: list[str]) -> list[str]:
    if len(lines) <= _TRACEBACK_LINES:
        return lines
    head = _TRACEBACK_LINES // 4
    # The end says what was raised, the beginning which call of the script led there.
    left_out = len(lines) - _TRACEBACK_LINES
    return [*lines[:head], f"... {left_out} lines left out ...", *lines[left_out + head :]]


def suspension_words(suspensions: Sequence[Raised]) -> str:
    """`suspended at step 120, saved in PATH`: what the first worker says that says something."""
    text = next((raised.text for raised in suspensions if raised.text), "")
    return f"suspended at {text}" if text else "suspended"


def suspension_text(deaths: Sequence[Death], *, world_size: int, delay_s: float) -> str:
    """The words for the terminal when all workers have suspended themselves and are started again."""
    words = suspension_words(
        [death.raised for death in sorted(deaths, key=lambda d: d.rank) if death.raised and death.suspended]
    )
    soon = f" in {delay_s:.0f} s" if delay_s else ""
    workers = f"all {world_size} workers" if world_size > 1 else "the worker"
    return f"photinus: {words}\nphotinus: starting {workers} again{soon} (no failure, and not counted as one)\n"
