"""A job on several hosts, started from one place: `photinus run --hostfile FILE`.

The process that the user typed runs no workers. It starts `remote` on each host: over ssh, or as a child where the host
is this one. Then, in steps that each wait for all hosts, so that one message tells of all that is wrong:

    hello     every host answers, with the same version
    prepare   every host has the folder and the program; the first binds the port at which the others will meet it
    run       every host starts `photinus run --nnodes N --node-rank R ...`, as if it had been typed there
    watch     output comes here; signals go there; the first host that fails ends the job

The job's secret is made here and goes to the hosts inside ssh, on stdin. When this process dies, however it dies, ssh
closes the launchers' stdin, and they end their part.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ...env import JOB_SECRET, STARTED_AS
from ...errors import LaunchError
from ...job.spec import JobSpec
from ...words import mask, mask_words
from ..local.interrupts import FROM_A_KEYBOARD, SIGNALS, Interrupts, handle_signals
from ..local.join import DEFAULT_PORT
from ..local.worker import python_command
from .command import exported_variables, find_here, ssh_command, variable_files
from .host import LOST, HostLines, Hosts, RemoteHost, Screen
from .hostfile import Host

_STEP_S = 0.05
_BEAT_S = 2.0
# All hosts shall have ended so long after Ctrl-C (the launcher there gives its workers 1.5 s), and after the second.
_INTERRUPT_S, _IMPATIENT_S = 1.9, 0.7
# How long the others may take by themselves after a host has failed, on top of the grace of their workers.
_FOLLOW_S = 4.0
# Wrong use and a missing device are found before the hosts have met, so the others wait in vain; as for a lost host.
_NEVER_MET_CODE, _HOPELESS_S = 2, 1.0
_PREPARE_S = 20.0  # names are looked up, and file systems may be slow


@dataclass(frozen=True)
class Way:
    """The way to reach hosts: the ssh command and port, and the names of environment variables to pass."""

    ssh: str = "ssh"
    port: int | None = None
    export: tuple[str, ...] = ()


WordsOf: TypeAlias = Callable[[int, str, int], list[str]]
"""What stands after `photinus run` on a host: of its number, and of the address and port at which the hosts meet."""


def start_hosts(
    spec: JobSpec, hosts: Sequence[Host], words_of: WordsOf, way: Way, run_here: Callable[[list[str]], int]
) -> int:
    """Runs the job on these hosts, and returns its exit code.

    `run_here` runs `photinus run` with other words in this process, where all hosts turn out to be this one.

    Raises:
        UsageError: a variable is not set, or a word cannot be carried out.
        LaunchError: a host could not be started or was lost, or the job failed; carries the exit code.
    """
    here = find_here(hosts)
    ssh = ssh_command(way.ssh, way.port, needed=not all(here))
    files = variable_files(Path(os.path.expanduser("~")), Path.cwd())
    environ = exported_variables(os.environ, way.export, files)
    if len(hosts) == 1 and here[0]:
        os.environ.update(environ)
        return run_here([*(["--dry-run"] if spec.dry_run else []), *words_of(0, "", 0)])
    if spec.dry_run:
        print(_dry_run_text(spec, hosts, words_of, here, ssh, environ))
        return 0
    with handle_signals() as interrupts:
        reached = Hosts(interrupts)
        try:
            for host, is_this in zip(hosts, here, strict=True):
                reached.add(host, here=is_this, ssh=ssh, silence_s=spec.hosts.heartbeat_timeout_s)
            return _Job(spec, words_of, environ, interrupts, reached).run()
        finally:
            reached.leave()


class _Job:
    def __init__(
        self,
        spec: JobSpec,
        words_of: WordsOf,
        environ: Mapping[str, str],
        interrupts: Interrupts,
        reached: Hosts,
    ) -> None:
        self._spec, self._words_of, self._environ = spec, words_of, environ
        self._interrupts, self._reached = interrupts, reached
        self._signals_sent = 0
        self._leave_at_s: float | None = None
        self._follow_at_s: float | None = None
        self._beat_at_s = time.monotonic() + _BEAT_S
        self._failed: RemoteHost | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self._is_merged = os.path.sameopenfile(1, 2)
        out, err = (Screen(target, gives_up=self._hear_while_blocked) for target in (1, 2))
        self._screens = {"out": out, "err": out if self._is_merged else err}
        self._lines = [
            {name: HostLines(screen, first=number == 0) for name, screen in self._screens.items()}
            for number in range(len(reached.all))
        ]
        self._hosts = reached.all

    def run(self) -> int:
        for prepare in (self._reached.reach, self._prepare):
            prepare()
            if self._interrupts.received:
                return self._report_interrupt("before the job was started")
            self._refuse_troubles()
        self._start()
        self._watch()
        if self._interrupts.received:
            return self._report_interrupt(f"the job on {len(self._hosts)} hosts was ended")
        return self._exit_code()

    def _exit_code(self) -> int:
        if self._failed is None:
            return 0
        code, name = self._failed.ended, self._failed.name
        if code is None:
            raise LaunchError(f"{self._failed.trouble} The launcher ended the others.")
        if code - 128 not in SIGNALS and all(host.ended == code for host in self._hosts):
            return code  # the host that leads has told what it was
        if code == LOST:
            raise LaunchError(
                f"host {name}: ssh lost the connection, or `photinus run` was killed there. The launcher ended the "
                f"others."
            )
        raise LaunchError(
            f"the job failed: host {name} was the first to end, with exit code {code}; see above", exit_code=code
        )

    def _refuse_troubles(self) -> None:
        troubles = [host.trouble for host in self._hosts if host.trouble is not None]
        if len(troubles) == 1:
            raise LaunchError(f"{troubles[0]} Nothing was started.")
        if troubles:
            count, listed = f"{len(troubles)} of {len(self._hosts)}", "".join(f"\n  {text}" for text in troubles)
            raise LaunchError(f"cannot use {count} hosts. Nothing was started.{listed}")

    def _prepare(self) -> None:
        for number, host in enumerate(self._hosts):
            listen = self._meeting_place() if number == 0 and len(self._hosts) > 1 else None
            host.send({"do": "prepare", "cwd": os.getcwd(), "program": asdict(self._spec.program), "listen": listen})
        if not self._reached.wait(lambda: all(host.answers or host.done for host in self._hosts), _PREPARE_S):
            late = ", ".join(host.name for host in self._hosts if not host.answers)
            raise LaunchError(
                f"no answer within {_PREPARE_S:.0f} s from {late}: its file system may hang, at the folder "
                f"{os.getcwd()}. Nothing was started."
            )

    def _meeting_place(self) -> dict[str, Any]:
        """Return the addresses on which the first host should listen."""
        hosts, first = self._spec.hosts, self._hosts[0]
        place = self._reached.meeting_place(first)
        if hosts.leader is not None:
            place["otherwise"] = None
        place["name"] = first.name if hosts.leader is None else hosts.leader
        return {**place, "port": DEFAULT_PORT if hosts.port is None else hosts.port, "or_another": hosts.port is None}

    def _start(self) -> None:
        place = self._hosts[0].answers.popleft()["prepared"]
        common = dict(self._environ)
        if len(self._hosts) > 1:
            common[JOB_SECRET.name] = secrets.token_hex(32)
        if place and self._spec.hosts.port is None and place["port"] != DEFAULT_PORT:
            self._say(f"port {DEFAULT_PORT} is taken on {self._hosts[0].name}; using port {place['port']}")
        for number, host in enumerate(self._hosts):
            host.answers.clear()
            environ = {**common, STARTED_AS.name: host.name}
            words = self._words_of(number, place.get("address", ""), place.get("port", 0))
            how = {"options": python_command()[1:], "environ": environ, "merged": self._is_merged}
            host.send({"do": "run", "words": words, **how})

    def _watch(self) -> None:
        while not all(host.done for host in self._hosts):
            self._pump()
            now = time.monotonic()
            self._pass_signals_on(now)
            if self._leave_at_s is not None and now > self._leave_at_s:
                break
            self._beat(now)
            self._note_failure(now)
        for lines in self._lines:
            for stream in lines.values():
                stream.show_rest()

    def _beat(self, now: float) -> None:
        if now > self._beat_at_s:
            self._beat_at_s = now + _BEAT_S
            self._reached.pass_signal(None)

    def _hear_while_blocked(self) -> bool:
        """A reader of the output does not go on (`| less`): the hosts hear of us, and of signals, all the same.

        Returns whether to wait for it no longer.
        """
        now = time.monotonic()
        self._beat(now)
        self._pass_signals_on(now)
        return self._leave_at_s is not None and now > self._leave_at_s

    def _pass_signals_on(self, now: float) -> None:
        for number in self._interrupts.received[self._signals_sent :]:
            self._signals_sent += 1
            within_s = _INTERRUPT_S if number in FROM_A_KEYBOARD else self._spec.stop_grace_s + _FOLLOW_S
            self._leave_at_s = now + (within_s if self._signals_sent == 1 else _IMPATIENT_S)
            self._reached.pass_signal(number)
        if self._interrupts.suspension_wanted:
            self._interrupts.suspension_wanted = False
            self._reached.pass_signal(signal.SIGUSR1)

    def _note_failure(self, now: float) -> None:
        """The first host that fails ends the job; the others may notice by themselves for a while."""
        if self._interrupts.received:
            return
        if self._failed is None:
            self._failed = next((host for host in self._hosts if host.trouble is not None or host.ended), None)
            if self._failed is None:
                return
            is_hopeless = self._failed.trouble is not None or self._failed.ended in (LOST, _NEVER_MET_CODE)
            self._follow_at_s = now + (_HOPELESS_S if is_hopeless else self._spec.stop_grace_s + _FOLLOW_S)
        if self._follow_at_s is not None and now >= self._follow_at_s:
            self._follow_at_s = None
            if not all(host.done for host in self._hosts):
                self._reached.pass_signal(signal.SIGTERM)
                self._leave_at_s = now + self._spec.stop_grace_s + _FOLLOW_S

    def _pump(self) -> None:
        self._reached.pump(_STEP_S)
        for host, lines in zip(self._hosts, self._lines, strict=True):
            while host.output:
                name, data = host.output.popleft()
                lines[name].take(data)

    def _report_interrupt(self, what: str) -> int:
        number = self._interrupts.received[0]
        names = [host.name for host in self._hosts if not host.done] if self._signals_sent else []
        silent = f"; {', '.join(names)} did not confirm in time" if names else ""
        self._say(f"ended by {number.name}: {what}{silent}")
        return 128 + number

    def _say(self, text: str) -> None:
        self._screens["err"].write_lines(f"photinus: {text}\n".encode())


def _dry_run_text(
    spec: JobSpec, hosts: Sequence[Host], words_of: WordsOf, here: Sequence[bool], ssh: str, environ: Mapping[str, str]
) -> str:
    lines = [f"{len(hosts)} host{'s' * (len(hosts) != 1)}, each in {os.getcwd()}:"]
    leader = spec.hosts.leader or hosts[0].name
    port = DEFAULT_PORT if spec.hosts.port is None else spec.hosts.port
    for number, (host, is_this) in enumerate(zip(hosts, here, strict=True)):
        how = "this host" if is_this else f"over {ssh} {host.destination}"
        words = words_of(number, leader, port)
        lines += ["", f"  {host.name} ({how})", f"    photinus run {shlex.join(mask_words(words))}"]
    lines += ["", "environment variables for the hosts:"]
    lines += [f"  {name}={value}" for name, value in sorted(mask(environ).items())] or ["  none"]
    return "\n".join(lines)
