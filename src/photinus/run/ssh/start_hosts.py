"""A job on several hosts, started from one place: `photinus run --hostfile FILE`.

The process that the user typed runs no workers. It starts `photinus.run.remote` on each host: over ssh, or as a child
where the host is this one. Then, in steps that each wait for all hosts, so that one message tells of all that is wrong:

    hello     every host answers, with the same version
    prepare   every host gets its `JobSpec`; it has the folder and the program; the first binds the port of the job
    run       every host gets the secret and the address of the first, and starts its part of the job
    watch     output comes here; signals go there; the first host that fails ends the job

The job's secret is made here and goes to the hosts inside ssh, on stdin. When this process dies, however it dies, ssh
closes the launchers' stdin, and they end their part.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import LaunchError
from ...job.own_address import reaches_from
from ...job.spec import JobSpec
from ...words import mask, mask_words
from ..local.interrupts import FROM_A_KEYBOARD, SIGNALS, Interrupted, Interrupts, block_signals, handle_signals
from ..local.join import DEFAULT_PORT
from .command import CONNECT_S, exported_variables, find_here, ssh_command, variable_files
from .host import LOST, RemoteHost, TroubleError
from .hostfile import Host
from .screen import HostLines, Screen

_STEP_S = 0.05
_BEAT_S = 2.0
# All hosts shall have ended so long after Ctrl-C (the launcher there gives its workers 1.5 s), and after the second.
_INTERRUPT_S, _IMPATIENT_S = 1.9, 0.7
# How long the others may take by themselves after a host has failed, on top of the grace of their workers.
_FOLLOW_S = 4.0
# Wrong use and a missing device are found before the hosts have met, so the others wait in vain; as for a lost host.
_NEVER_MET_CODE, _HOPELESS_S = 2, 1.0
_PREPARE_S = 20.0  # names are looked up, and file systems may be slow
# For the commands that reach the hosts to end by themselves, when all is over.
_PATIENCE_S, _HASTE_S = 1.0, 0.1


class SshOptions(NamedTuple):
    """The way to reach hosts: the ssh command and port, and the names of environment variables to pass."""

    command: str = "ssh"
    port: int | None = None
    export: tuple[str, ...] = ()


def start_hosts(
    specs: Sequence[JobSpec], hosts: Sequence[Host], options: SshOptions, run_here: Callable[[JobSpec], int]
) -> int:
    """Run the job on these hosts, each with its own spec, and return its exit code.

    `run_here` runs the job in this process, where the only host is this one.

    Raises:
        UsageError: a variable is not set, or ssh is missing.
        LaunchError: a host could not be started or was lost, or the job failed; carries the exit code.
    """
    here = find_here(hosts)
    ssh = ssh_command(options.command, options.port, needed=not all(here))
    environ = exported_variables(os.environ, options.export, variable_files(Path(os.path.expanduser("~")), Path.cwd()))
    if len(hosts) == 1 and here[0]:
        os.environ.update(environ)
        return run_here(specs[0])
    specs = [_place(spec, number, hosts) for number, spec in enumerate(specs)]
    if specs[0].dry_run:
        print(_dry_run_text(specs, hosts, here, ssh, environ))
        return 0
    silence_s = specs[0].hosts.heartbeat_timeout_s
    remote = [RemoteHost(h, here=is_this, ssh=ssh, silence_s=silence_s) for h, is_this in zip(hosts, here, strict=True)]
    sys.stdout.flush()
    sys.stderr.flush()
    with handle_signals() as interrupts, ThreadPoolExecutor(1, "photinus-screen") as writer:
        return asyncio.run(_Job(specs, remote, environ, interrupts, writer).run())


def _place(spec: JobSpec, number: int, hosts: Sequence[Host]) -> JobSpec:
    """Return a host's spec with its name, and its number among several hosts."""
    if len(hosts) > 1:
        spec = replace(spec, hosts=replace(spec.hosts, nnodes=(len(hosts), len(hosts)), node_rank=number))
    return replace(spec, started_as=hosts[number].name)


class _Job:
    def __init__(
        self,
        specs: Sequence[JobSpec],
        hosts: Sequence[RemoteHost],
        environ: Mapping[str, str],
        interrupts: Interrupts,
        writer: ThreadPoolExecutor,
    ) -> None:
        self._specs, self._hosts, self._environ = specs, hosts, environ
        self._grace_s = specs[0].stop_grace_s
        self._interrupts = interrupts
        self._writer = writer  # of the screens: a terminal that takes no more must hold up neither hosts nor signals
        self._signals_sent = 0
        self._leave_at_s: float | None = None
        self._is_merged = os.path.sameopenfile(1, 2)
        self._out = Screen(1, self._gives_up)
        self._err = self._out if self._is_merged else Screen(2, self._gives_up)

    async def run(self) -> int:
        attending = asyncio.ensure_future(self._attend())
        try:
            with block_signals():
                await self._on_all(lambda number, host: host.start())
            await self._on_all(lambda number, host: host.reach())
            first, *_ = await self._on_all(self._prepare)
            failed = await self._watch(first)
            if not self._interrupts.received:
                return self._exit_code(failed)
            return await self._report_interrupt(f"the job on {len(self._hosts)} hosts was ended")
        except Interrupted:
            return await self._report_interrupt("before the job was started")
        finally:
            attending.cancel()
            await self._leave()

    def _exit_code(self, failed: RemoteHost | None) -> int:
        if failed is None:
            return 0
        code = failed.ended or 0
        if code - 128 not in SIGNALS and all(host.ended == code for host in self._hosts):
            return code  # the host that leads has reported the cause
        if code == LOST:
            raise LaunchError(
                f"host {failed.name}: ssh lost the connection, or Photinus was killed there. The launcher ended the "
                f"others{self._silent_hosts()}."
            )
        raise LaunchError(
            f"the job failed: host {failed.name} was the first to end, with exit code {code}; see above"
            f"{self._silent_hosts()}",
            exit_code=code,
        )

    async def _on_all(self, do: Callable[[int, RemoteHost], Awaitable[Any]]) -> list[Any]:
        """Have all hosts do the same, and return their answers.

        Raises:
            Interrupted: a signal came.
            LaunchError: hosts are in trouble; names all of them.
        """
        tasks = [asyncio.ensure_future(do(number, host)) for number, host in enumerate(self._hosts)]
        # When one is in trouble, others may be too, and are named with it; but not for ever.
        hasten_at_s = time.monotonic() + CONNECT_S + 1.0
        while True:
            answered, pending = await asyncio.wait(tasks, timeout=_STEP_S)
            is_late = time.monotonic() > hasten_at_s and any(task.exception() for task in answered)
            if not pending or is_late or self._interrupts.received:
                break
        for task in pending:
            task.cancel()
        if self._interrupts.received:
            raise Interrupted
        troubles = [
            str(task.exception()) for task in tasks if task.done() and isinstance(task.exception(), TroubleError)
        ]
        if len(troubles) == 1:
            raise LaunchError(f"{troubles[0]} Nothing was started.")
        if troubles:
            count, listed = f"{len(troubles)} of {len(self._hosts)}", "".join(f"\n  {text}" for text in troubles)
            raise LaunchError(f"cannot use {count} hosts. Nothing was started.{listed}")
        return [task.result() for task in tasks]

    async def _prepare(self, number: int, host: RemoteHost) -> dict[str, Any]:
        listen = self._meeting_place(host) if number == 0 and len(self._hosts) > 1 else None
        order = {"cwd": os.getcwd(), "environ": self._environ, "spec": self._specs[number].to_json(), "listen": listen}
        return await host.prepare({**order, "merged": self._is_merged}, _PREPARE_S)

    def _meeting_place(self, first: RemoteHost) -> dict[str, Any]:
        """Return the addresses on which the first host should listen; see `listen_as`."""
        elsewhere = [host.hello for host in self._hosts if not host.on_this_machine]
        own = first.hello["address"]
        if first.here:  # the address of this machine that it uses towards the others
            own = elsewhere[0]["seen"] if elsewhere else None
            with contextlib.suppress(OSError):
                own = reaches_from(elsewhere[0]["address"]) if own is not None else None
        typed = self._specs[0].hosts
        return {
            "name": typed.leader or first.name,
            "port": DEFAULT_PORT if typed.port is None else typed.port,
            "or_another": typed.port is None,
            "otherwise": own if typed.leader is None else None,
            "alone": not elsewhere,
        }

    async def _watch(self, place: Mapping[str, Any]) -> RemoteHost | None:
        """Run the job's part on all hosts; return the host that failed first, if one did."""
        address, port = place.get("address"), place.get("port")
        if port not in (None, DEFAULT_PORT) and self._specs[0].hosts.port is None:
            await self._say(f"port {DEFAULT_PORT} is taken on {self._hosts[0].name}; using port {port}")
        secret = secrets.token_hex(32) if len(self._hosts) > 1 else None
        order = {"secret": secret, "leader": address, "port": port}
        lines = [HostLines(s, first=n == 0) for n in range(len(self._hosts)) for s in (self._out, self._err)]
        show = [partial(self._on_screen, each.take) for each in lines]
        pairs = zip(self._hosts, show[::2], show[1::2], strict=True)
        parts = [asyncio.ensure_future(host.run(order, out, err)) for host, out, err in pairs]
        failed: RemoteHost | None = None
        follow_at_s = float("inf")
        while (await asyncio.wait(parts, timeout=_STEP_S))[1] and not self._gives_up():
            now = time.monotonic()
            # The first host that fails ends the job; the others may notice by themselves for a while.
            if failed is None and (failed := self._first_failed()) is not None:
                is_hopeless = failed.ended in (LOST, _NEVER_MET_CODE)
                follow_at_s = now + (_HOPELESS_S if is_hopeless else self._grace_s + _FOLLOW_S)
            if now >= follow_at_s and not self._interrupts.received:
                follow_at_s = float("inf")
                self._pass_signal(signal.SIGTERM)
                self._leave_at_s = now + self._grace_s + _FOLLOW_S
        for part in parts:
            part.cancel()
        for each in lines:
            await self._on_screen(each.show_rest)
        return failed or self._first_failed()

    async def _attend(self) -> None:
        """Pass signals on to the hosts that run, and let them know now and then that somebody is still here."""
        beat_at_s = time.monotonic() + _BEAT_S
        while True:
            await asyncio.sleep(_STEP_S)
            now = time.monotonic()
            if now > beat_at_s:
                beat_at_s = now + _BEAT_S
                self._pass_signal(None)
            for number in self._interrupts.received[self._signals_sent :]:
                self._signals_sent += 1
                within_s = _INTERRUPT_S if number in FROM_A_KEYBOARD else self._grace_s + _FOLLOW_S
                self._leave_at_s = now + (within_s if self._signals_sent == 1 else _IMPATIENT_S)
                self._pass_signal(number)
            if self._interrupts.suspension_wanted:
                self._interrupts.suspension_wanted = False
                self._pass_signal(signal.SIGUSR1)

    def _first_failed(self) -> RemoteHost | None:
        return next((host for host in self._hosts if host.ended), None)

    def _pass_signal(self, number: int | None) -> None:
        for host in self._hosts:
            host.pass_signal(number)

    def _gives_up(self) -> bool:
        """Return whether to wait no longer: for hosts, and for a reader of the output."""
        return self._leave_at_s is not None and time.monotonic() > self._leave_at_s

    async def _leave(self) -> None:
        """End all lifelines, wait a moment for the commands to end, and end those that do not."""
        for host in self._hosts:
            host.close_lifeline()
        patience_s = _HASTE_S if self._interrupts.received else _PATIENCE_S
        for number, wait_s in ((None, patience_s), (signal.SIGTERM, 0.3), (signal.SIGKILL, 1.0)):
            deadline = time.monotonic() + wait_s
            for host in self._hosts:
                if number is not None:
                    host.signal_command(number)
            while any(host.is_reached for host in self._hosts) and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
        for host in self._hosts:
            host.close()

    async def _report_interrupt(self, what: str) -> int:
        number = self._interrupts.received[0]
        await self._say(f"ended by {number.name}: {what}{self._silent_hosts()}")
        return 128 + number

    def _silent_hosts(self) -> str:
        names = [host.name for host in self._hosts if host.is_running]
        return f"; {', '.join(names)} did not confirm in time" if names else ""

    async def _say(self, text: str) -> None:
        await self._on_screen(partial(self._err.write_lines, f"photinus: {text}\n".encode()))

    async def _on_screen(self, write: Callable[..., None], *data: bytes) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, write, *data)


def _dry_run_text(
    specs: Sequence[JobSpec], hosts: Sequence[Host], here: Sequence[bool], ssh: str, environ: Mapping[str, str]
) -> str:
    lines = [f"{len(hosts)} host{'s' * (len(hosts) != 1)}, each in {os.getcwd()}:"]
    for spec, host, is_this in zip(specs, hosts, here, strict=True):
        how = "this host" if is_this else f"over {ssh} {host.destination}"
        program = replace(spec.program, arguments=tuple(mask_words(spec.program.arguments)))
        meeting = replace(spec.hosts, leader=spec.hosts.leader or hosts[0].name, port=spec.hosts.port or DEFAULT_PORT)
        masked = replace(spec, program=program, dry_run=False, hosts=meeting if len(hosts) > 1 else spec.hosts)
        fields = {name: value for name, value in json.loads(masked.to_json()).items() if value != {}}
        lines += ["", f"  {host.name} ({how})", *(f"    {name}: {json.dumps(v)}" for name, v in fields.items())]
    lines += ["", "environment variables for the hosts:"]
    lines += [f"  {name}={value}" for name, value in sorted(mask(environ).items())] or ["  none"]
    return "\n".join(lines)
