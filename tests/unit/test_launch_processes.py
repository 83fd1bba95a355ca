"""Worker processes: started, watched by their ends, told apart, and ended with all that they started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from photinus.job.attempt import AttemptMembers
from photinus.job.deaths import root_cause, suspension_words
from photinus.job.spec import JobSpec, Program
from photinus.run.local.guard import Guard, as_subreaper
from photinus.run.local.interrupts import Interrupted, handle_signals
from photinus.run.local.job import Job
from photinus.run.local.output import Output
from photinus.run.local.processes import Processes

DEADLINE_S = 30.0
LOST_PEER = "exec('from photinus.errors import PeerLostError; raise PeerLostError()')\n"


class NoGuard(Guard):
    """Notes what it is told; the real one forks, which a test process with threads should not."""

    def __init__(self) -> None:
        self.groups: set[int] = set()

    def protect(self, process_group: int) -> None:
        self.groups.add(process_group)

    def release(self, process_group: int) -> None:
        self.groups.remove(process_group)


@contextmanager
def workers(tmp_path, text, count=2, orders=None):
    """`count` workers that run `text` with `rank` defined; stopped at the end whatever happens."""
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys, time, signal\nrank = int(os.environ['RANK'])\n{text}")
    guard, output = NoGuard(), Output()
    with handle_signals() as interrupts, as_subreaper():
        parts = {"guard": guard, "output": output, "interrupts": interrupts, "orders": orders}
        processes = made(Program("script", str(script)), count, **parts)
        try:
            processes.start()
            yield processes, guard, interrupts
        finally:
            processes.stop(signal.SIGKILL, 0.0)
            processes.close()
            output.close()


def made(program, count, **parts):
    job = Job(JobSpec(program), "job", count, dict(os.environ))
    return Processes(job, AttemptMembers((count,), 0, 0, "job", 0), **parts)


def pids(processes):
    """Process ids by rank."""
    return {worker.rank: worker.process.pid for worker in processes._workers}


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the deadline of the test has passed"
        time.sleep(0.005)


def watch(processes, condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the deadline of the test has passed"
        processes.wait(0.2)


def state(pid):
    """R, S, T, Z and so on, as in /proc; X for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def alive(pid):
    return state(pid) not in "XZ"


def test_workers_that_finish_leave_no_death_and_no_process(tmp_path):
    with workers(tmp_path, "sys.exit(0)") as (processes, guard, interrupts):
        started = pids(processes)
        assert guard.groups == interrupts.groups == set(started.values())
        watch(processes, lambda: not processes.any_running())
        assert not processes.any_failed()
        assert processes.finished_ranks() == [0, 1]
        processes.stop(signal.SIGTERM, 5.0)
        assert processes.deaths() == []
        assert guard.groups == interrupts.groups == set()
        assert not any(alive(pid) for pid in started.values())


def test_each_worker_leads_a_session_of_its_own_and_all_but_rank_0_read_nothing(tmp_path):
    text = (
        f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(f'{{os.getsid(0)}} {{os.readlink(\"/proc/self/fd/0\")}}')"
    )
    with workers(tmp_path, text) as (processes, _, _):
        watch(processes, lambda: not processes.any_running())
        for rank, pid in pids(processes).items():
            session, stdin = (tmp_path / str(rank)).read_text().split()
            assert int(session) == pid
            assert (stdin == "/dev/null") == (rank == 1 or os.readlink("/proc/self/fd/0") == "/dev/null")


def test_workers_have_the_options_of_the_launchers_python(tmp_path, monkeypatch):
    monkeypatch.setattr("subprocess._args_from_interpreter_flags", lambda: ["-O", "-P", "-Werror", "-X", "dev"])
    text = f"with open({str(tmp_path / 'flags')!r}, 'w') as file: print(sys.flags.optimize, sys.warnoptions[-1:], "
    text += "sys.flags.dev_mode, getattr(sys.flags, 'safe_path', False), file=file)"
    with workers(tmp_path, text, count=1) as (processes, _, _):
        watch(processes, lambda: not processes.any_running())
        assert (tmp_path / "flags").read_text() == "1 ['error'] True False\n"


def test_a_kill_is_seen_at_once_and_told_from_an_exception_that_follows(tmp_path):
    text = f"if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(0.3)\n{LOST_PEER}"
    with workers(tmp_path, text, count=3) as (processes, _, _):
        watch(processes, processes.any_failed)
        processes.wait_for_reasons(DEADLINE_S, DEADLINE_S)  # ends by itself once every rank has spoken
        processes.stop(signal.SIGTERM, 5.0)
        deaths = processes.deaths()
        assert [d.rank for d in deaths] == [0, 1, 2]
        cause = root_cause(deaths)
        assert (cause.rank, cause.pid, cause.status) == (1, pids(processes)[1], -signal.SIGKILL)
        assert [d.consequence for d in deaths] == [True, False, True]


def test_settling_waits_for_the_culprit_while_only_consequences_are_known(tmp_path):
    text = f"if rank == 0:\n    {LOST_PEER}time.sleep(0.6)\nraise ValueError('culprit')\n"
    with workers(tmp_path, text) as (processes, _, _):
        watch(processes, processes.any_failed)
        processes.wait_for_reasons(0.05, DEADLINE_S)
        processes.stop(signal.SIGTERM, 5.0)
        assert root_cause(processes.deaths()).raised.text == "culprit"


def test_settling_does_not_wait_for_ranks_that_are_busy(tmp_path):
    with workers(tmp_path, "if rank == 0: sys.exit(3)\ntime.sleep(100)\n") as (processes, _, _):
        watch(processes, processes.any_failed)
        begun = time.monotonic()
        processes.wait_for_reasons(0.1, DEADLINE_S)
        processes.stop(signal.SIGTERM, DEADLINE_S)
        assert time.monotonic() - begun < DEADLINE_S / 2
        first, second = processes.deaths()
        assert (first.status, first.ended_by_us) == (3, False)
        assert (second.status, second.ended_by_us) == (-signal.SIGTERM, True)


@pytest.mark.parametrize(("letter", "waits"), [("r", False), ("s", True), ("c", True)])
def test_after_a_sigkill_only_a_rank_in_the_middle_of_a_loops_step_is_not_waited_for(tmp_path, letter, waits):
    text = f"from photinus.job import status\nstatus.update(letter={letter!r})\n"
    text += "if rank == 1:\n    time.sleep(0.3)\n    os.kill(os.getpid(), 9)\ntime.sleep(100)\n"
    with workers(tmp_path, text) as (processes, _, _):
        watch(processes, processes.any_failed)
        begun = time.monotonic()
        processes.wait_for_reasons(1.5, DEADLINE_S)
        assert (time.monotonic() - begun >= 1.5) == waits
        processes.stop(signal.SIGTERM, DEADLINE_S)
        assert root_cause(processes.deaths()).rank == 1


RAISES_SLOWLY = """
from photinus.job import status
class Slow(Exception):
    def __str__(self):
        time.sleep(0.1)
        return "slow"
status.update(letter="r")
if rank == 0:
    open(sys.argv[0] + ".raises", "w").close()
    raise Slow
while not os.path.exists(sys.argv[0] + ".raises"):
    time.sleep(0.001)
os.kill(os.getpid(), 9)
"""


def test_after_a_sigkill_a_rank_that_records_its_own_exception_is_waited_for(tmp_path):
    with workers(tmp_path, RAISES_SLOWLY) as (processes, _, _):
        watch(processes, processes.any_failed)
        processes.wait_for_reasons(DEADLINE_S, DEADLINE_S)
        processes.stop(signal.SIGTERM, DEADLINE_S)
        first, second = processes.deaths()
        assert (first.raised.type_name, first.raised.text, second.status) == ("Slow", "slow", -signal.SIGKILL)


KID_DEAF_TO_SIGTERM = """
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
kid_does = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(100)"
kid = subprocess.Popen([sys.executable, "-c", kid_does], stdout=subprocess.PIPE)
kid.stdout.readline()
with open(f"{sys.argv[0]}.kid{rank}", "w") as file:
    file.write(f"{kid.pid}\\n")
time.sleep(100)
"""


def test_a_worker_deaf_to_sigterm_is_killed_after_the_grace_with_its_children(tmp_path):
    with workers(tmp_path, KID_DEAF_TO_SIGTERM) as (processes, _, _):
        files = [tmp_path / f"script.py.kid{rank}" for rank in range(2)]
        wait_until(lambda: all(f.exists() and f.read_text().endswith("\n") for f in files))
        kids = [int(f.read_text()) for f in files]
        begun = time.monotonic()
        processes.stop(signal.SIGTERM, 0.3)
        assert 0.3 <= time.monotonic() - begun < DEADLINE_S / 2
        assert [(d.status, d.ended_by_us) for d in processes.deaths()] == [(-signal.SIGKILL, True)] * 2
        assert not any(alive(pid) for pid in [*kids, *pids(processes).values()])
        # Not even a zombie: this process adopted them and has buried them.
        assert not any(os.path.exists(f"/proc/{pid}") for pid in kids)


LEAVES_A_KID = """
import subprocess
kid = subprocess.Popen(["sleep", "100"], start_new_session={own_session})
with open(f"{sys.argv[0]}.kid", "w") as file:
    file.write(str(kid.pid))
os._exit(0)
"""


@pytest.mark.parametrize("own_session", [False, True])
def test_children_of_a_worker_that_finished_end_with_it(tmp_path, own_session):
    text = LEAVES_A_KID.replace("{own_session}", str(own_session))
    with workers(tmp_path, text, count=1) as (processes, _, _):
        watch(processes, lambda: not processes.any_running())
        kid = int((tmp_path / "script.py.kid").read_text())
        assert alive(kid)
        processes.stop(signal.SIGTERM, 0.0)
        assert not alive(kid)


def test_orphans_are_reaped_while_their_worker_runs(tmp_path):
    text = f"for _ in range(5): os.system('true &')\nopen({str(tmp_path / 'ready')!r}, 'w')\ntime.sleep(100)\n"
    with workers(tmp_path, text, count=1) as (processes, _, _):
        ours = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
        watch(processes, lambda: (tmp_path / "ready").exists())
        watch(processes, lambda: not any(state(int(pid)) == "Z" for pid in ours.read_text().split()))


def test_a_stopped_worker_leaves_when_asked(tmp_path):
    with workers(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(100)\n", count=1) as (processes, _, _):
        pid = pids(processes)[0]
        wait_until(lambda: state(pid) == "T")
        begun = time.monotonic()
        processes.stop(signal.SIGTERM, DEADLINE_S)
        assert time.monotonic() - begun < DEADLINE_S / 2
        assert processes.deaths()[0].status == -signal.SIGTERM


def test_a_worker_that_raised_but_does_not_leave_is_killed_when_its_time_is_over(tmp_path):
    text = "import threading\nthreading.Thread(target=time.sleep, args=(100,)).start()\nraise ValueError('bad')\n"
    with workers(tmp_path, text, count=1) as (processes, _, _):
        deadline = time.monotonic() + DEADLINE_S
        while processes.any_running() and time.monotonic() < deadline:
            processes.wait(0.05)
            processes.kill_overdue(0.2)
        death = processes.deaths()[0]
        assert (death.status, death.raised.text, death.ended_by_us) == (-signal.SIGKILL, "bad", False)
        assert death.overdue_s >= 0.2


def test_an_error_recorded_by_torch_and_survived_is_not_held_against_a_worker(tmp_path):
    record = '{"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "", "timestamp": "1"}}}'
    text = f"open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({record!r})\ntime.sleep(0.5)\n"
    with workers(tmp_path, text, count=1) as (processes, _, _):
        while processes.any_running():
            processes.wait(0.05)
            processes.kill_overdue(0.0)
        assert (processes.any_failed(), processes.finished_ranks()) == (False, [0])


def test_a_worker_that_exits_with_0_because_it_was_asked_to_leave_had_not_finished(tmp_path):
    ready = tmp_path / "ready"
    text = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nopen({str(ready)!r}, 'w')\ntime.sleep(100)\n"
    with workers(tmp_path, text, count=1) as (processes, _, _):
        wait_until(ready.exists)
        processes.stop(signal.SIGTERM, 5.0)
        assert (processes.deaths(), processes.finished_ranks()) == ([], [])


def test_the_launcher_sleeps_during_the_grace_when_another_host_has_sent_something(tmp_path):
    text = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen({str(tmp_path / 'ready')!r}, 'w')\ntime.sleep(100)\n"
    orders = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    with workers(tmp_path, text, count=1, orders=orders) as (processes, _, _):
        wait_until((tmp_path / "ready").exists)
        used_s = time.thread_time()
        processes.stop(signal.SIGTERM, 1.5)
        assert time.thread_time() - used_s < 0.5
    os.close(orders)


def test_a_second_interrupt_cuts_the_grace_short(tmp_path):
    text = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen({str(tmp_path / 'ready')!r}, 'w')\ntime.sleep(100)\n"
    with workers(tmp_path, text, count=1) as (processes, _, interrupts):
        wait_until((tmp_path / "ready").exists)
        timers = [threading.Timer(0.3 * n, os.kill, (os.getpid(), signal.SIGTERM)) for n in (1, 2)]
        for timer in timers:
            timer.start()
        begun = time.monotonic()
        processes.stop(signal.SIGTERM, DEADLINE_S)
        assert time.monotonic() - begun < DEADLINE_S / 2
        assert interrupts.received == [signal.SIGTERM, signal.SIGTERM]
        assert interrupts.forced


def test_a_terminal_that_is_closed_signals_twice_and_cuts_no_grace_short(monkeypatch):
    with handle_signals() as interrupts:
        signal.raise_signal(signal.SIGHUP)
        monkeypatch.setattr(interrupts, "_first_at_s", interrupts._first_at_s - 5.0)
        signal.raise_signal(signal.SIGHUP)
        assert (interrupts.received, interrupts.forced) == ([signal.SIGHUP], False)
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.forced


def test_a_worker_that_is_killed_from_outside_while_it_is_stopped_is_told_from_those_that_left(tmp_path):
    text = f"rank or signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen({str(tmp_path)!r} + f'/{{rank}}', 'w')\n"
    with workers(tmp_path, text + "time.sleep(100)\n") as (processes, _, _):
        wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
        killer = threading.Timer(0.2, os.kill, (pids(processes)[0], signal.SIGKILL))
        killer.start()
        processes.stop(signal.SIGTERM, DEADLINE_S)
        found = [(death.status, death.ended_by_us) for death in processes.deaths()]
        assert found == [(-signal.SIGKILL, False), (-signal.SIGTERM, True)]


def test_a_worker_that_sigterm_only_asks_to_suspend_is_ended_at_once_as_sigterm_would(tmp_path):
    text = "from photinus.job import status\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nstatus.update(letter='r')\n"
    with workers(tmp_path, f"{text}open({str(tmp_path / 'ready')!r}, 'w')\ntime.sleep(100)\n", 1) as (processes, _, _):
        wait_until((tmp_path / "ready").exists)
        begun = time.monotonic()
        processes.stop(signal.SIGTERM, DEADLINE_S)
        assert time.monotonic() - begun < DEADLINE_S / 2
        assert [(d.status, d.ended_by_us) for d in processes.deaths()] == [(-signal.SIGTERM, True)]


def test_a_worker_is_asked_once_and_has_one_grace(tmp_path):
    note = f"open({str(tmp_path / 'asked')!r}, 'a').write('.')"
    text = f"signal.signal(signal.SIGTERM, lambda *_: {note})\nopen({str(tmp_path / 'ready')!r}, 'w')\n"
    with workers(tmp_path, text + "while True: time.sleep(100)\n", count=1) as (processes, _, _):
        wait_until((tmp_path / "ready").exists)
        begun = time.monotonic()
        processes.suspend(0.1)
        processes._asked_at_s -= DEADLINE_S  # as if it had been asked long ago: nothing of the grace is left
        processes.stop(signal.SIGTERM, DEADLINE_S)
        assert time.monotonic() - begun < DEADLINE_S / 2
        assert (tmp_path / "asked").read_text() == "."


def test_what_a_worker_saved_is_known_before_it_has_left(tmp_path):
    text = "import atexit\natexit.register(time.sleep, 100)\nclass Suspended(SystemExit): pass\n"
    text += "raise Suspended('step 7')\n"
    with workers(tmp_path, text, count=1) as (processes, _, _):
        wait_until(processes.suspensions)
        assert processes.any_running()
        assert suspension_words(processes.suspensions()) == "suspended at step 7"


def test_of_the_runs_that_ranks_are_in_the_last_one_that_was_begun_is_known(tmp_path):
    text = "from photinus.job import status\nstatus.update(out=f'{9 + rank}:runs/{rank}')\n"
    text += f"open({str(tmp_path)!r} + f'/{{rank}}', 'w')\ntime.sleep(100)\n"
    with workers(tmp_path, text) as (processes, _, _):
        wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
        assert processes.out() == "10:runs/1"


def test_waiting_ends_when_an_interrupt_comes(tmp_path):
    with workers(tmp_path, "time.sleep(100)", count=1) as (processes, _, interrupts):
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        begun = time.monotonic()
        processes.wait(DEADLINE_S)
        timer.join()
        assert time.monotonic() - begun < DEADLINE_S / 2
        assert interrupts.first == signal.SIGINT
        assert not interrupts.forced


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with handle_signals() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupts.received == [signal.SIGINT]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_before_anything_runs_an_interrupt_strikes_at_once():
    def interrupted_import():
        with interrupts.raise_at_once():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(DEADLINE_S)

    with handle_signals() as interrupts:
        begun = time.monotonic()
        with pytest.raises(Interrupted):
            interrupted_import()
        assert interrupts.received == [signal.SIGTERM]
        with pytest.raises(Interrupted):  # one that came before counts as well
            interrupted_import()
        assert interrupts.received == [signal.SIGTERM]
        assert time.monotonic() - begun < DEADLINE_S / 2


def test_a_worker_that_cannot_be_started_raises_the_systems_error(tmp_path):
    with handle_signals() as interrupts, closing(Output()) as output:
        guard = NoGuard()
        processes = made(Program("script", "x" * 200_000), 1, guard=guard, output=output, interrupts=interrupts)
        with pytest.raises(OSError, match="Argument list too long"):
            processes.start()
        assert guard.groups == set()


LAUNCHER = """
import os, subprocess, sys, time
from photinus.run.local.guard import start_guard
with start_guard() as guard:
    kid = subprocess.Popen(["sleep", "100"], start_new_session=True)
    gone = subprocess.Popen(["sleep", "100"], start_new_session=True)
    guard.protect(kid.pid)
    guard.protect(gone.pid)
    guard.release(gone.pid)
    print(guard.pid, kid.pid, gone.pid, flush=True)
    if sys.argv[1] == "leave":
        sys.exit(0)
    time.sleep(100)
"""


@pytest.mark.parametrize("end", ["kill", "leave"])
def test_the_guard_kills_protected_groups_only_when_the_launcher_did_not_take_leave(end):
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, end], stdout=subprocess.PIPE, text=True)
    guard, kid, gone = map(int, re.findall(r"\d+", launcher.stdout.readline()))
    try:
        if end == "kill":
            assert os.getsid(guard) == guard  # what ends the launcher's terminal or group does not reach it
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
                os.kill(guard, number)
            os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait(DEADLINE_S)
        wait_until(lambda: not alive(guard))
        assert alive(gone)
        if end == "kill":
            wait_until(lambda: not alive(kid))
        else:
            assert alive(kid)
    finally:
        launcher.stdout.close()
        for pid in (kid, gone):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_guard_that_was_killed_does_not_disturb_its_launcher():
    code = (
        "import os, signal\nfrom photinus.run.local.guard import start_guard\n"
        "with start_guard() as guard:\n"
        "    os.kill(guard.pid, signal.SIGKILL)\n"
        "    os.waitid(os.P_PID, guard.pid, os.WEXITED | os.WNOWAIT)\n"
        "    guard.protect(1)\n    guard.release(1)\n"
        "print('fine')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("fine\n", "", 0)
