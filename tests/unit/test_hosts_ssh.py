"""What the place where the user typed hands to the hosts, and how it reads what comes back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

import photinus.run.ssh.host as host_module
from photinus.cli.flags import parse_run
from photinus.cli.main import main
from photinus.cli.selection import Share
from photinus.errors import UsageError
from photinus.job.spec import JobSpec, Program
from photinus.run.ssh.command import exported_variables, is_here, remote_command, ssh_command, variable_files
from photinus.run.ssh.host import RemoteHost, TroubleError
from photinus.run.ssh.hostfile import Host
from photinus.run.ssh.screen import HostLines, Screen
from photinus.version import __version__

T = TypeVar("T")
A = Host("a", 4, None, "hosts:1")


@pytest.mark.parametrize("device", ["--cpu", "--ranks-per-gpu 2"])
def test_the_job_that_reaches_a_host_is_the_one_that_was_typed(device):
    typed = (
        f"--hostfile hosts {device} --max-restarts 7 --stop-grace 0.5 --preempt-after 9 --rdzv-id night "
        "--oversubscribe --start-method spawn --role r --master-port 29501 --master-addr a "
        "--rdzv-conf join_timeout=30,last_call_timeout=2,heartbeat_timeout=9 --log-dir logs --redirects 0:1,2:3 "
        "--tee 3 --local-ranks-filter 0,2 --no-python ./train --lr 0.1"
    )
    spec = parse_run(typed.split()).spec
    part = Share(A, count=4).job(spec)
    assert part == replace(spec, nproc_per_node=4)
    assert JobSpec.from_json(part.to_json()) == part


@pytest.mark.parametrize(
    ("typed", "share", "workers"),
    [
        ("", Share(A, count=4), (4, None)),
        ("", Share(A), ("auto", None)),
        ("", Share(A, devices=(2, 0), count=2, gpus=True), ("auto", (2, 0))),
        ("--cpu", Share(A, devices=(2, 0), count=2, gpus=True), ("auto", (2, 0))),
        ("", Share(A, count=2, gpus=True), ("auto", (0, 1))),
        ("--cpu", Share(A, count=2, gpus=True), ("auto", (0, 1))),
        ("--nproc-per-node 1", Share(A, devices=(2, 0), count=2, gpus=True), ("auto", (2,))),
        ("--nproc-per-node 2", Share(A, count=4), (2, None)),
        ("--nproc-per-node gpu", Share(A, count=4), ("gpu", None)),
    ],
)
def test_workers_of_a_host(typed, share, workers):
    spec = share.job(parse_run([*typed.split(), "--hostfile", "hosts", "x.py"]).spec)
    assert (spec.nproc_per_node, spec.devices) == workers
    assert spec.hosts.nnodes is None  # one host alone needs no meeting


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--local-addr 10.0.0.1", "--local-addr 10.0.0.1 and --hostfile hosts are mutually exclusive"),
        (
            "--rdzv-conf is_host=1",
            "is_host=1 and --hostfile hosts are mutually exclusive: the first host of the file leads",
        ),
        ("--node-rank 1", "are mutually exclusive"),
        ("--nnodes 2", "are mutually exclusive"),
    ],
)
def test_flags_for_one_host_are_refused_and_not_passed_over(typed, told):
    with pytest.raises(UsageError) as caught:
        parse_run([*typed.split(), "--hostfile", "hosts", "x.py"])
    assert told in str(caught.value)


def test_a_dry_run_shows_no_secret(tmp_path, monkeypatch, capsys):
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("HF_HOME", "/data")
    (tmp_path / "x.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--dry-run", "--hostfile", "hosts", "x.py", "--hf_token", "hf_abc"]) == 0
    shown = capsys.readouterr().out
    assert "  HF_HOME=/data\n  HF_TOKEN=***\n" in shown
    assert "hf_abc" not in shown


def test_more_workers_than_slots_are_refused():
    flags = parse_run(["--nproc-per-node", "5", "--hostfile", "hosts", "x.py"])
    with pytest.raises(
        UsageError, match=r"asks for 5 workers on each host, but a has 4 slots for this job \(hosts:1\)"
    ):
        Share(A, count=4).job(flags.spec)


def test_neither_secret_nor_environment_stands_in_the_command():
    command = remote_command(Host("node1", 2, "root"), here=False, ssh=ssh_command("sh -i 'a key'", 2222, needed=True))
    assert command[:5] == ["sh", "-i", "a key", "-p", "2222"]
    assert "BatchMode=yes" in command
    assert any(word.startswith("ConnectTimeout=") for word in command)
    assert command[-2] == "root@node1"
    assert command[-1].startswith("cd /; exec ")
    assert command[-1].endswith(" -m photinus.run.remote")
    assert "ssh" not in remote_command(Host("localhost"), here=True)


def test_this_host_is_known_by_name_and_by_address():
    assert is_here(Host("localhost"))
    assert is_here(Host("127.0.0.1"))
    assert is_here(Host("127.0.0.2"))  # loopback, whatever its number
    assert not is_here(Host("192.0.2.1"))  # kept for documentation, nobody has it
    assert not is_here(Host("localhost", user="somebody"))


def test_what_steers_training_is_handed_over_and_what_describes_a_host_is_not(tmp_path):
    environ = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
        "HF_HOME": "/data",
        "PYTHONPATH": "src",
        "LD_LIBRARY_PATH": "/opt/lib",
        "CUDA_LAUNCH_BLOCKING": "1",
        "PHOTINUS_TIMEOUT_S": "60",
        "THP_MEM_ALLOC_ENABLE": "0",
        "CUDA_VISIBLE_DEVICES": "1",
        "PHOTINUS_HOST_ID": "x",
        "PHOTINUS_JOB_SECRET": "s",
        "TORCHELASTIC_RUN_ID": "outer",
        "PATH": "/bin",
        "HOME": "/root",
        "SSH_AUTH_SOCK": "/tmp/agent",
        "MY_DATA": "/data/mine",
    }
    over = exported_variables(environ, ("MY_DATA",))
    assert over.pop("MY_DATA") == "/data/mine"
    expected = "NCCL_DEBUG OMP_NUM_THREADS HF_HOME PYTHONPATH LD_LIBRARY_PATH CUDA_LAUNCH_BLOCKING PHOTINUS_TIMEOUT_S"
    assert set(over) == {*expected.split(), "THP_MEM_ALLOC_ENABLE"}
    with pytest.raises(UsageError, match="--export NOT_SET: NOT_SET is not set here"):
        exported_variables(environ, ("NOT_SET",))


def test_deepspeeds_files_of_variables_are_read(tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    (home / ".deepspeed_env").write_text("NCCL_IB_DISABLE=1\nA=home\n")
    (here / ".deepspeed_env").write_text("# ours\n\nexport A=here\nB='x = y'\nC=\n")
    over = exported_variables({"A": "shell", "NCCL_IB_DISABLE": "0"}, (), variable_files(home, here))
    assert over == {"NCCL_IB_DISABLE": "1", "A": "here", "B": "x = y", "C": ""}
    assert exported_variables({"A": "shell"}, ("A",), variable_files(home, here))["A"] == "shell"
    assert len(variable_files(here, here)) == 1
    assert len(variable_files(Path("x" * 300), here)) == 1  # a home folder that cannot be looked into
    (here / ".deepspeed_env").write_bytes(b"A=caf\xe9\n")
    assert os.fsencode(exported_variables({}, (), variable_files(here, here))["A"]) == b"caf\xe9"
    (here / ".deepspeed_env").write_text("A=1\nnot a variable\n")
    with pytest.raises(UsageError, match=r"\.deepspeed_env:2: 'not a variable' is not valid"):
        exported_variables({}, (), variable_files(home, here))


def on_host(monkeypatch: pytest.MonkeyPatch, program: str, do: Callable[[RemoteHost], Awaitable[T]]) -> T:
    """What `do` returns for a host where this program is in the place of `remote`."""
    monkeypatch.setattr(host_module, "remote_command", lambda *_, **__: [sys.executable, "-c", program])

    async def within_a_loop() -> T:
        host = RemoteHost(Host("a"), here=True)
        try:
            await host.start()
            return await do(host)
        finally:
            host.close_lifeline()
            while host.is_reached:
                await asyncio.sleep(0.01)
            host.close()

    return asyncio.run(within_a_loop())


HEAD = "import os, sys\nfrom photinus.run.ssh.command import MARK\n"
HELLO = f'MARK + b\'{{"hello": {{"photinus": "{__version__}", "address": null, "seen": null}}}}\\n\''


@pytest.mark.timeout(60)
def test_answers_are_read_behind_what_a_shell_prints_and_output_behind_the_last_order(monkeypatch):
    program = (
        f"{HEAD}os.write(2, b'bash: warning\\n')\nfor byte in b'motd\\n' + {HELLO}: os.write(1, bytes([byte]))\n"
        'sys.stdin.readline(); os.write(1, b\'{"prepared": {"port": 1}}\\n\')\n'
        "sys.stdin.readline(); os.write(1, b'{\"x\": 1}'); os.write(2, b'words')\n"
        "sys.exit(sys.stdin.readline() != '15\\n')"
    )
    output = []

    async def do(host: RemoteHost) -> int | None:
        async def show(data: bytes) -> None:
            output.append(data)
            host.pass_signal(15)

        host.pass_signal(9)  # before the job is started there is nobody to take it
        await host.reach()
        assert await host.prepare({"cwd": "/"}, 20.0) == {"port": 1}
        assert not host.is_running
        await host.run({}, show, show)
        assert not host.is_running
        return host.ended

    assert on_host(monkeypatch, program, do) == 0
    assert sorted(output) == [b"words", b'{"x": 1}']


@pytest.mark.timeout(60)
def test_a_host_that_takes_nothing_holds_up_nobody_and_gets_all_of_it_later(monkeypatch):
    program = (
        f"{HEAD}os.write(1, {HELLO})\nos.kill(os.getpid(), 19)\n"
        'os.write(1, b\'{"prepared": {"read": %d}}\\n\' % len(sys.stdin.readline())); sys.stdin.read()'
    )

    async def do(host: RemoteHost) -> dict[str, Any]:
        await host.reach()
        with pytest.raises(
            TroubleError, match="host a: no answer within 0 s: its file system may hang, at the folder /x"
        ):
            await host.prepare({"cwd": "/x", "spec": "x" * 500_000}, 0.3)  # more than a pipe holds
        host.signal_command(signal.SIGCONT)
        return await host.prepare({"cwd": "/x"}, 20.0)

    assert on_host(monkeypatch, program, do)["read"] > 500_000


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("end", "code"), [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_a_process_that_holds_the_output_open_does_not_keep_a_host_from_ending(monkeypatch, end, code):
    program = (
        f"{HEAD}import subprocess\nos.write(1, {HELLO})\nsys.stdin.readline()\n"
        f"subprocess.Popen(['sleep', '4'], stdin=subprocess.DEVNULL)\nos.write(1, b'last words'); {end}"
    )
    output = []

    async def do(host: RemoteHost) -> int | None:
        async def show(data: bytes) -> None:
            output.append(data)

        await host.reach()
        begun_s = time.monotonic()
        await host.run({}, show, show)
        assert time.monotonic() - begun_s < 3.5
        return host.ended

    assert on_host(monkeypatch, program, do) == code
    assert output == [b"last words"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("print('bash: no such thing'); raise SystemExit(3)", "ssh exited with code 3: bash: no such thing."),
        (
            "import sys; print('motd'); sys.exit('a: Permission denied.')",
            "ssh exited with code 1: a: Permission denied.",
        ),
        ("import os; os.kill(os.getpid(), 9)", "ssh was killed by SIGKILL: it printed nothing."),
        (
            "raise SystemExit('No module named photinus.run.remote')",
            f"ssh exited with code 1: No module named photinus.run.remote. All hosts need Photinus {__version__}.",
        ),
    ],
)
def test_what_ssh_says_in_place_of_a_hello_is_shown_with_its_exit_code(monkeypatch, program, told):
    with pytest.raises(TroubleError) as caught:
        on_host(monkeypatch, program, RemoteHost.reach)
    by_hand = f"Try by hand: ssh a {sys.executable} -m photinus --version"
    assert str(caught.value) == f"host a: {told} {by_hand}"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("program", "told"),
    [
        (f"{HEAD}os.write(1, MARK + b'hello\\n'); input()", "the answer is not valid (Expecting value"),
        (f"{HEAD}os.write(1, MARK + b'[]\\n'); input()", "the answer is not valid ("),
        (f"{HEAD}os.write(1, MARK + b'{{}}\\n'); input()", "the answer is not valid ('hello')."),
        (f"{HEAD}os.write(1, MARK); sys.exit('bye')", "ssh lost the connection (bye)."),
        (f"{HEAD}os.write(1, {HELLO}.replace(b'{__version__}', b'0.0'))", "Photinus 0.0 is installed there, and "),
    ],
)
def test_an_answer_of_another_program_is_refused(monkeypatch, program, told):
    with pytest.raises(TroubleError) as caught:
        on_host(monkeypatch, program, RemoteHost.reach)
    assert str(caught.value).startswith(f"host a: {told}")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("job", "told"),
    [
        ({"cwd": "/nowhere"}, "host a: cannot enter the folder /nowhere (No such file or directory)"),
        ({"spec": '{"program": {}}'}, "host a: the job's specification is of a different version of Photinus"),
        (
            {"spec": JobSpec(Program("module", "train_it")).to_json()},
            "host a: module train_it was not found: there is no train_it in /, in PYTHONPATH or installed in",
        ),
    ],
)
def test_a_host_says_why_it_cannot_take_part(job, told):
    order = {"cwd": "/", "environ": {}, "spec": JobSpec(Program("program", "true")).to_json(), "listen": None}

    async def do() -> None:
        host = RemoteHost(Host("a"), here=True)
        try:
            await host.start()
            await host.reach()
            await host.prepare({**order, **job}, 20.0)
        finally:
            host.close_lifeline()
            host.close()

    with pytest.raises(TroubleError, match=re.escape(told)):
        asyncio.run(do())


@pytest.mark.timeout(60)
def test_a_module_that_only_the_typed_pythonpath_has_is_found_on_a_host(tmp_path):
    (tmp_path / "train_it.py").write_text("")
    spec = JobSpec(Program("module", "train_it")).to_json()
    order = {"cwd": "/", "environ": {"PYTHONPATH": str(tmp_path)}, "spec": spec, "listen": None}

    async def do() -> dict[str, Any]:
        host = RemoteHost(Host("a"), here=True)
        try:
            await host.start()
            await host.reach()
            return await host.prepare(order, 20.0)
        finally:
            host.close_lifeline()
            host.close()

    assert asyncio.run(do()) == {"address": None, "port": None}


class Pipe:
    """A place for output that can be read back."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def text(self) -> str:
        os.close(self.writing)
        with os.fdopen(self.reading, "rb") as stream:
            return stream.read().decode()


def test_lines_of_hosts_are_never_mixed():
    pipe = Pipe()
    screen = Screen(pipe.writing)
    first, second = HostLines(screen, first=True), HostLines(screen, first=False)
    first.take(b"one\nhalf")
    second.take(b"[2] al")
    second.take(b"pha\n[3] beta\n[2] ga")
    first.take(b" a line\n")
    second.show_rest()
    assert pipe.text() == "one\n[2] alpha\n[3] beta\nhalf a line\n[2] ga\n"


def test_lines_begin_below_a_line_that_has_not_ended():
    pipe = Pipe()
    screen = Screen(pipe.writing)
    screen.write(b"Continue? ")
    screen.write_lines(b"[1] line\n")
    screen.write_lines(b"[2] line\n")
    assert pipe.text() == "Continue? \n[1] line\n[2] line\n"


def test_while_a_reader_does_not_go_on_hosts_and_signals_are_looked_after():
    pipe, looks = Pipe(), []
    screen = Screen(pipe.writing, gives_up=lambda: bool(looks.append(1)) or len(looks) > 2)
    screen.write(b"x" * (1 << 20))  # more than a pipe holds
    assert len(looks) == 3
    assert 0 < len(pipe.text()) < 1 << 20


def test_the_first_hosts_bytes_pass_as_they_are():
    pipe = Pipe()
    first = HostLines(Screen(pipe.writing), first=True)
    said = b"\x1b[1mbold\x1b[0m\n\r 10%|\r 20%|\r 30%|\n\nno newline: "
    for begin in range(0, len(said), 3):
        first.take(said[begin : begin + 3])
    first.show_rest()
    assert pipe.text().encode() == said


def test_a_progress_bar_of_the_first_host_is_shown_as_it_goes_on():
    pipe = Pipe()
    first = HostLines(Screen(pipe.writing), first=True)
    first.take(b" 10%|\r 20")
    assert os.read(pipe.reading, 100) == b" 10%|\r"
    first.show_rest()
    assert pipe.text() == " 20"


def test_neither_side_imports_torch():
    code = (
        "import sys, photinus.run.remote, photinus.run.ssh.start_hosts\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert said.stdout.strip() == "[]"
