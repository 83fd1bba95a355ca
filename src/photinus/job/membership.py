"""The rules by which the hosts of a job start, stop, start again and end. No sockets, no clock, no processes.

The leader feeds in what happens, with the time, and carries out the acts that come back:

    gathering   hosts come in and say that they are ready. A fixed number of hosts starts when all are; a job whose
                hosts come and go starts when the least are and no more came for a while (the last call), or all.
                After join_timeout it starts without those that are not ready; with too few, it ends
                From the second attempt on hosts end their workers first, for which --stop-grace is added to it
    running     where hosts may join and exit, each that does makes the others gather again. A host that joins when a
                rank has already ended well waits for the next attempt, or the end. With a fixed number of hosts, a host
                that exits ends the job. A host that is lost costs a restart, and has to come back for it
    settling    a worker failed: all hosts end their workers and report, and one verdict on all of them follows. A host
                that has not reported after join_timeout and --stop-grace is lost
    ended       for good

A host that is lost while the others settle is the cause of what they saw. Where hosts are waited for, a line says so
after 3 s, and then once a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .restart_policy import Report

# Hosts that one command starts come within a second or two; a line before that would be noise.
_SAY_AFTER_S = 3.0
_SAY_EVERY_S = 60.0
# After a restart the hosts are known and come at once, so there is little to wait for.
_LAST_CALL_AGAIN_S = 1.0
_FAILED = 1


class RefusedHostError(Exception):
    """The host cannot take part; the message says why and what to do."""


class PeerHost(NamedTuple):
    """A host that takes part, or wants to. `key` is known to the leader for this connection only."""

    key: int
    host: str
    address: str
    workers: int
    node_rank: int | None = None
    leads: bool = False

    @property
    def name(self) -> str:
        """For messages: host and address."""
        return f"{self.host} ({self.address})"


class StartAttempt(NamedTuple):
    """Start an attempt with these hosts, in the order of their ranks."""

    peers: tuple[PeerHost, ...]
    attempt: int


class Stop(NamedTuple):
    """These hosts end their workers and report, since a worker of another one failed."""

    keys: tuple[int, ...]


class Regroup(NamedTuple):
    """These hosts end their workers and gather again; `unharmed`: no worker is missing yet, so they can save first."""

    keys: tuple[int, ...]
    reason: str
    unharmed: bool = False


class Drop(NamedTuple):
    """Close the connection to this host, which does not do what it was asked to; it may come back."""

    key: int


class Decide(NamedTuple):
    """All have reported: find the verdict, tell all, and call `go_on`."""

    reports: tuple[Report, ...]
    keys: tuple[int, ...]
    world_size: int
    attempt: int


class End(NamedTuple):
    """The job is over, for all hosts. `reason` is empty when it ended well."""

    reason: str
    exit_code: int


class Say(NamedTuple):
    """Words for the leader's terminal."""

    text: str


Act = StartAttempt | Stop | Regroup | Drop | Decide | End | Say


@dataclass
class Membership:
    """The state of a job on several hosts.

    Attributes:
        least, most: number of hosts.
        join_timeout_s: how long the least number may take to come.
        last_call_s: how long more are waited for when the least are there.
        heartbeat_timeout_s: how long a host may be silent before it counts as lost.
        stop_grace_s: how long workers may take to end.
        spend_restart: takes one of the restarts that are left and says which, or nothing when none is.
    """

    least: int
    most: int
    join_timeout_s: float
    last_call_s: float
    heartbeat_timeout_s: float = 30.0
    stop_grace_s: float = 0.0
    spend_restart: Callable[[], str] = lambda: ""
    state: str = "gathering"
    attempt: int = -1
    _peers: dict[int, PeerHost] = field(default_factory=dict)
    _order: list[int] = field(default_factory=list)  # of the last attempt, then of arrival
    _ready: set[int] = field(default_factory=set)
    _running: tuple[PeerHost, ...] = ()
    _finished: set[int] = field(default_factory=set)
    _any_rank_ended: bool = False
    _reports: dict[int, Report] = field(default_factory=dict)
    _losses: list[str] = field(default_factory=list)
    _any_exited: bool = False  # one of those went by itself, and does not come back
    _since_s: float | None = None  # gathering or settling began
    _enough_since_s: float | None = None
    _said_s: float | None = None

    @property
    def is_fixed(self) -> bool:
        """Return whether hosts may neither join nor exit."""
        return self.least == self.most

    def add(self, peer: PeerHost, now_s: float) -> None:
        """A host wants to take part. RefusedHostError: it may not."""
        here = ", ".join(self._peers[key].name for key in self._order)
        if self.state == "ended":
            raise RefusedHostError("the job has ended")
        # With a fixed number, a job that runs has all its hosts: the loss of one would have ended or restarted it.
        if len(self._peers) >= self.most or (self.is_fixed and self.state == "running"):
            raise RefusedHostError(
                f"the job already has its {self.most} host{'s' * (self.most > 1)}: {here}. Check --nnodes, and that "
                f"the command runs once per host."
            )
        if peer.node_rank is not None:
            # The same number typed on two hosts is the usual slip.
            for other in self._peers.values():
                if other.node_rank == peer.node_rank:
                    raise RefusedHostError(
                        f"--node-rank {peer.node_rank} is taken by {other.name}; each host needs its own number, 0 to "
                        f"{self.most - 1} (or omit --node-rank: hosts are numbered as they join)"
                    )
        if self._since_s is None:
            self._since_s = now_s
        # The place in the order is that of arrival, until an attempt gives it a better one.
        self._peers[peer.key] = peer
        self._order.append(peer.key)

    def ready(self, key: int, now_s: float) -> list[Act]:
        """A host has no workers running (any more), and waits for the next attempt."""
        if self.state == "running" and self._runs(key):
            return []  # said twice
        self._ready.add(key)
        if self.state == "gathering":
            return self.tick(now_s)
        # A new world would start all ranks, also those that have ended well and must not train again.
        if self.state == "running" and self._any_rank_ended:
            return [Say(f"host {self._peers[key].name} has joined and waits: ranks that finished would start again")]
        if self.state == "running":
            # Nothing has failed, so the workers may save before they make room for the new host.
            return self._regroup(f"host {self._peers[key].name} has joined", now_s, unharmed=True)
        return []

    def note_ended_rank(self) -> None:
        """A rank ended well while others run."""
        self._any_rank_ended = True

    def fail(self, key: int, report: Report, now_s: float) -> list[Act]:
        """A worker of this host failed, or it was asked to stop and report: how its workers ended."""
        if self.state not in ("running", "settling") or not self._runs(key):
            return []
        # Only the first failure stops the others; what comes after it are the answers to that.
        first = self.state == "running"
        if first:
            self.state, self._since_s, self._said_s = "settling", now_s, None
        self._reports[key] = report
        # A host that was lost meanwhile can neither be stopped nor report.
        others = tuple(peer.key for peer in self._running if peer.key != key and peer.key in self._peers)
        return [*([Stop(others)] if first and others else []), *self._settle(now_s)]

    def finish(self, key: int, now_s: float) -> list[Act]:
        """All workers of this host ended well."""
        self._any_rank_ended = True
        self._finished.add(key)
        if self.state == "running" and all(peer.key in self._finished for peer in self._running):
            return self._end("", 0)
        return []

    def remove_host(self, key: int, why: str, now_s: float, *, lost: bool = False) -> list[Act]:
        """A host is no longer there: `why` is like "was lost: ..." or "left: ..."; one that was lost may come back."""
        peer = self._peers.pop(key, None)
        if peer is None:
            return []
        self._order.remove(key)
        self._ready.discard(key)
        was_running = self._runs(key)
        if self.state == "ended":
            return []
        # It had work to do, so the job cannot end well without it.
        if self.state == "running" and was_running and key not in self._finished:
            return self._go_on_without(f"host {peer.name} {why}", now_s, any_exited=not lost)
        if self.state == "running" and was_running:
            # Its workers had all ended well: only its launcher is missing, and nobody needs that.
            return self.finish(key, now_s)
        if self.state == "settling" and was_running:
            # What it reported is no longer the first cause: what the others saw may follow from its loss.
            self._reports.pop(key, None)
            self._losses.append(f"host {peer.name} {why}")
            self._any_exited |= not lost
            return self._settle(now_s)
        # It exited by itself, so the others would wait for it in vain. Before the first attempt the user may start it
        # again.
        if self.state == "gathering" and self.is_fixed and self.attempt >= 0 and not lost:
            return self._end(f"host {peer.name} {why}", _FAILED)
        self._said_s = None
        # It may have been the host that all waited for, or the one that made them enough.
        return [Say(f"host {peer.name} {why}"), *self.tick(now_s)]

    def lose_store(self, why: str, now_s: float) -> list[Act]:
        """The process that holds the attempt's store is gone, which costs a restart."""
        return self._start_again(why, now_s) if self.state in ("running", "settling") else []

    def end(self, reason: str, exit_code: int) -> list[Act]:
        """The leader itself wants the job to be over."""
        return [] if self.state == "ended" else self._end(reason, exit_code)

    def go_on(self, restart: bool, now_s: float) -> None:
        """Go on after the verdict that `Decide` asked for."""
        if not restart:
            self.state = "ended"
        else:
            self._gather(now_s)

    def tick(self, now_s: float) -> list[Act]:
        """Return the acts that follow from the time alone; call this a few times a second."""
        if self.state not in ("gathering", "settling") or self._since_s is None:
            return []
        limit_s = self._limit_s()
        is_over = now_s - self._since_s > limit_s
        if self.state == "settling":
            late = [peer for peer in self._running if peer.key in self._peers and peer.key not in self._reports]
            if is_over:
                why = f"was lost: no report within {limit_s:g} s"
                # It may hang with workers alive. Without it the others can go on, and it may come back.
                drops = [Drop(peer.key) for peer in late]
                return [*drops, *(act for peer in late for act in self.remove_host(peer.key, why, now_s, lost=True))]
            return self._say_waiting(now_s, f"the reports of {', '.join(peer.name for peer in late)}")
        count = len(self._ready)
        if count < self.least:
            self._enough_since_s = None
            if is_over:
                return self._end(
                    f"only {count} of {self._wanted()} ready within {limit_s:g} s; here: {self._names()}", _FAILED
                )
            # The last call starts over when there are enough again.
            return self._say_waiting(now_s, self._wanted())
        if self._enough_since_s is None:
            self._enough_since_s = now_s
        # A host that has come and still ends its workers will be ready soon: starting without it would waste a restart.
        everybody = count == len(self._peers)
        last_call_s = self.last_call_s if self.attempt < 0 else min(_LAST_CALL_AGAIN_S, self.last_call_s)
        if is_over or (everybody and (count == self.most or now_s - self._enough_since_s >= last_call_s)):
            return self._start_attempt()
        if everybody:
            return []
        names = ", ".join(self._peers[key].name for key in self._order if key not in self._ready)
        return self._say_waiting(now_s, f"{names} to be ready")

    def _start_attempt(self) -> list[Act]:
        self.state = "running"
        self.attempt += 1
        self._running = _ranked([self._peers[key] for key in self._order if key in self._ready])
        here = [peer.key for peer in self._running]
        # The next attempt keeps this order, so that a host keeps its ranks where it can.
        self._order = here + [key for key in self._order if key not in here]
        self._ready.clear()
        self._finished.clear()
        self._any_rank_ended = False
        self._reports.clear()
        self._losses.clear()
        self._any_exited = False
        return [StartAttempt(self._running, self.attempt)]

    def _gather(self, now_s: float) -> None:
        self.state = "gathering"
        self._since_s = now_s
        self._enough_since_s = None
        self._said_s = None
        self._running = ()

    def _regroup(self, reason: str, now_s: float, *, unharmed: bool = False) -> list[Act]:
        keys = tuple(peer.key for peer in self._running if peer.key in self._peers)
        self._gather(now_s)
        # Those that have nothing running any more need not be asked twice.
        return [Regroup(keys, reason, unharmed), *self.tick(now_s)]

    def _go_on_without(self, reason: str, now_s: float, *, any_exited: bool) -> list[Act]:
        """Return what follows when hosts went that were needed: the others gather again, if the rules let them."""
        if not self.is_fixed:
            return self._regroup(reason, now_s)
        # A host that exits by itself does not come back for a restart; one that was lost may.
        return self._end(reason, _FAILED) if any_exited else self._start_again(reason, now_s)

    def _start_again(self, reason: str, now_s: float) -> list[Act]:
        restart = self.spend_restart()
        return self._regroup(f"{reason} ({restart})", now_s) if restart else self._end(reason, _FAILED)

    def _settle(self, now_s: float) -> list[Act]:
        there = [peer for peer in self._running if peer.key in self._peers]
        if any(peer.key not in self._reports for peer in there):
            return []
        # A lost host is the cause of what the others saw, so their reports would blame the wrong rank.
        if self._losses:
            return self._go_on_without("; ".join(self._losses), now_s, any_exited=self._any_exited)
        reports = tuple(self._reports[peer.key] for peer in there)
        keys = tuple(peer.key for peer in there)
        return [Decide(reports, keys, sum(peer.workers for peer in self._running), self.attempt)]

    def _end(self, reason: str, exit_code: int) -> list[Act]:
        self.state = "ended"
        return [End(reason, exit_code)]

    def _say_waiting(self, now_s: float, what: str) -> list[Act]:
        assert self._since_s is not None
        due_s = self._since_s + _SAY_AFTER_S if self._said_s is None else self._said_s + _SAY_EVERY_S
        if now_s < due_s:
            return []
        self._said_s = now_s
        left_s = self._limit_s() - (now_s - self._since_s)
        return [Say(f"waiting for {what}, {left_s:.0f} s more at most; here: {self._names()}")]

    def _limit_s(self) -> float:
        # From the second attempt on hosts first end workers, which may save.
        return self.join_timeout_s + (self.stop_grace_s if self.attempt >= 0 else 0.0)

    # Also the test for late answers: once hosts gather again, nobody runs, and what they still send is ignored.
    def _runs(self, key: int) -> bool:
        return any(peer.key == key for peer in self._running)

    def _wanted(self) -> str:
        return f"{self.least} host{'s' * (self.least > 1)}"

    def _names(self) -> str:
        return ", ".join(self._peers[key].name for key in self._order) or "none"


def _ranked(peers: Sequence[PeerHost]) -> tuple[PeerHost, ...]:
    """The hosts in the order of their ranks: where the user put them, then the leader, then as they came."""
    count = len(peers)
    fixed = {peer.node_rank: peer for peer in peers if peer.node_rank is not None and peer.node_rank < count}
    rest = [peer for peer in peers if peer not in fixed.values()]
    # Rank 0 belongs on the leading host, whose terminal people watch.
    rest.sort(key=lambda peer: not peer.leads)
    waiting = iter(rest)
    return tuple(fixed[place] if place in fixed else next(waiting) for place in range(count))
