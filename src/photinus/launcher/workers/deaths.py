"""How workers ended, and which of them was the first cause. Pure functions over plain records.

When one rank dies, the others fail within milliseconds because they miss it. Blame goes to the first death that is
not such a consequence:

    1. a rank that says itself that it lost a peer (or timed out waiting for one) is a consequence;
    2. SIGABRT comes after the rest at equal times: gloo ends a process so when a peer vanishes at a bad moment;
    3. among what is left, the earliest; a rank killed by SIGKILL counts half a second earlier than it was seen dead,
       since the kernel closes its sockets, which the others notice, before it reports the death.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Death", "Raised", "ended_by_suspension", "exit_code_of", "first_cause", "signature"]

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
_HANDED_ON = "had no error"  # our own words (trainer.agreement) where a rank raises what another one has failed with
_LOST_PEER_TEXTS = (
    "broken pipe",
    "connection closed by peer",
    "connection refused",
    "connection reset by peer",
    "connection was likely closed",
    "connectfullmesh failed",
    "failed to recv, got 0 bytes",
    _HANDED_ON,
    "ncclremoteerror",
    "read error [",
    "timed out waiting",
    "write error [",
)
_KILL_IS_SEEN_LATE_S = 0.5


@dataclass(frozen=True)
class Raised:
    """What a worker wrote about its uncaught exception (see `worker.describe`).

    Attributes:
        chain: (type name, text) of the exception and of what it was raised from or during.
        traceback: as Python prints it, empty for sys.exit.
        exit_code: the code that the worker will leave with.
        raised_at_s: monotonic clock of the worker's host; None when another writer did not say.
        place: FILE:LINE that raised it; empty when that is not known.
    """

    chain: tuple[tuple[str, str], ...]
    traceback: str
    exit_code: int = 1
    raised_at_s: float | None = None
    place: str = ""

    @classmethod
    def from_json(cls, text: str) -> Raised | None:
        """Reads the error file of a worker, ours or one written by torch's `@record`; None when it is neither."""
        try:
            data: Any = json.loads(text)
            message = data["message"]
            traceback = str(message["extraInfo"].get("py_callstack", ""))
            own = data.get("photinus")
            if own is None:
                type_name, _, said = str(message["message"]).partition(": ")
                return cls(((type_name, said),), traceback)
            chain = tuple((str(name), str(said)) for name, said in own["chain"])
            facts = int(own["exit_code"]), float(own["raised_at_s"]), str(own["place"])
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
        """Whether it is no failure: the worker saved its work and left (`photinus.Suspended`)."""
        return self.type_name == "Suspended"

    @property
    def lost_a_child(self) -> bool:
        """Whether it says that a process of the worker's own was killed, in the words of torch's DataLoader."""
        return any(words in self.text for words in ("killed by signal", "exited unexpectedly"))

    @property
    def lost_a_peer(self) -> bool:
        """Whether the exception, or one behind it, says that another rank was lost."""
        return any(
            name in _LOST_PEER_TYPES or any(sign in text.lower() for sign in _LOST_PEER_TEXTS)
            for name, text in self.chain
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
        """Whether it died only because another did."""
        return self.ended_by_us or (self.raised is not None and self.raised.lost_a_peer)

    @property
    def suspended(self) -> bool:
        """Whether it saved its work and left because it was asked to."""
        return self.raised is not None and self.raised.suspended

    @property
    def signal_name(self) -> str | None:
        """SIGKILL and the like, None for a process that left by itself."""
        if self.status >= 0:
            return None
        try:
            return signal.Signals(-self.status).name
        except ValueError:  # real-time signals have no names
            return f"signal {-self.status}"

    @property
    def _since_s(self) -> float:
        if self.raised is not None and self.raised.raised_at_s is not None:
            return min(self.seen_at_s, self.raised.raised_at_s)
        return self.seen_at_s - (_KILL_IS_SEEN_LATE_S if self.status == -signal.SIGKILL else 0.0)


def first_cause(deaths: Sequence[Death]) -> Death:
    """The death that the others follow from; `deaths` must not be empty."""
    return min(deaths, key=lambda d: (d.ended_by_us, d.consequence, d._since_s, d.status == -signal.SIGABRT, d.rank))


def exit_code_of(death: Death) -> int:
    """What the launcher exits with for this cause: 128 + signal, the worker's own code, 1 for an exception."""
    if death.raised is not None:  # however it went on from there
        return death.raised.exit_code
    return 128 - death.status if death.status < 0 else death.status


def signature(death: Death) -> tuple[str, str, int]:
    """Equal for two deaths of the same kind, whichever rank and attempt."""
    if death.raised is not None:
        return (death.raised.type_name, death.raised.text, death.raised.exit_code)
    return ("", "", death.status)


def ended_by_suspension(deaths: Sequence[Death]) -> bool:
    """Whether these are the ends of workers that suspended themselves, and no failure."""
    return any(death.suspended for death in deaths) and all(death.suspended or death.ended_by_us for death in deaths)
