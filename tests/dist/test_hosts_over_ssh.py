"""A job on several hosts, typed in one place: real ssh servers on hosts that are network namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.test_run import run_job, script
from tests.netns import network_hosts
from tests.over_ssh import REPORT, Place, environ_of, finish, reports, start_staying, two_hosts, words_of
from tests.sshd import ssh_server

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with two_hosts(tmp_path) as made:
        yield made


@pytest.mark.parametrize("here", ["host-0", "localhost"])
def test_every_rank_finds_its_place_its_arguments_and_the_others(place, here):
    hosts = place.hostfile(f"# two hosts\n{here} slots=2\nhost-1 slots=1\n")
    (place.folder / ".deepspeed_env").write_text("FROM_FILE=read\n")
    words = ["--hostfile", hosts, "--export", "MINE", script(place.folder, REPORT), "gloo", "--lr", "0.1"]
    ended = place.run(*words, MINE="mine", CUDA_VISIBLE_DEVICES="")
    assert ended.code == 0, ended.err
    found = reports(ended)
    assert sorted(found) == [0, 1, 2], ended.err
    assert "without a secret" not in ended.err
    assert [found[rank]["host"] for rank in range(3)] == ["host-0", "host-0", "host-1"]
    assert [found[rank]["LOCAL_RANK"] for rank in range(3)] == ["0", "1", "0"]
    assert [found[rank]["GROUP_RANK"] for rank in range(3)] == ["0", "0", "1"]
    assert [found[rank]["LOCAL_WORLD_SIZE"] for rank in range(3)] == ["2", "2", "1"]
    for report in found.values():
        assert (report["WORLD_SIZE"], report["PHOTINUS_WORLD_SIZE"]) == ("3", "3")
        assert report["argv"] == ["gloo", "--lr", "0.1"]
        assert report["cwd"] == str(place.folder)
        assert report["stdin"] == os.devnull
        assert (report["mine"], report["deepspeed"]) == ("mine", "read")
        assert report["secret"] == []
        assert report["total"] == 6


def test_include_chooses_hosts_and_a_host_alone_needs_no_meeting(place):
    hosts = place.hostfile("host-0 slots=2\nhost-1 slots=2\n")
    ended = place.run("--hostfile", hosts, "--include", "host-1:1", "--cpu", script(place.folder, REPORT))
    assert ended.code == 0, ended.err
    assert {(r["host"], r["WORLD_SIZE"]) for r in reports(ended).values()} == {("host-1", "1")}


def test_gpus_that_a_host_does_not_have_are_refused_with_the_host_named(place):
    hosts = place.hostfile("host-0 slots=2\nhost-1 slots=2\n")
    ended = place.run("--hostfile", hosts, "--include", "host-1:0,1", script(place.folder, REPORT))
    assert ended.code == 2
    assert (
        "photinus: host host-1: DeviceError: --include host-1:0,1 asks for GPUs: --device 0,1 names 2 GPUs, but"
        in ended.err
    )
    assert ended.out == ""


def test_the_exit_code_is_the_first_causes_and_the_others_end(place):
    hosts = place.hostfile("host-0 slots=1\nhost-1 slots=1\n")
    text = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(1000)\n"
    begun = time.monotonic()
    ended = place.run("--hostfile", hosts, "--max-restarts", "0", script(place.folder, text))
    assert time.monotonic() - begun < 30
    assert ended.code == 7, ended.err
    assert "photinus: rank 1 " in ended.err
    assert ended.err.count("the job failed") == 1  # both launchers know, and one tells


def test_the_secret_is_in_no_command_line_and_no_environment(place, monkeypatch):
    secret = "ab" * 32
    text = (
        f"import secrets\nreal = secrets.token_hex\nsecrets.token_hex = lambda n: {secret!r} if n == 32 else real(n)\n"
    )
    (place.folder / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(place.folder))
    process, pids = start_staying(place)
    try:
        everybody = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        launchers = [pid for pid in everybody if "photinus.run.remote" in words_of(pid)]
        assert len(launchers) >= 2
        assert {*pids} < {*everybody}
        assert not [pid for pid in everybody if secret in words_of(pid) or secret in environ_of(pid).values()]
    finally:
        process.send_signal(signal.SIGTERM)
        assert finish(process).code == 143


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("192.168.78.9 slots=1", ["host 192.168.78.9: ssh exited with code 255: ssh: connect to host 192.168.78.9"]),
        ("no-such-host slots=1", ["host no-such-host: ssh exited with code 255: ssh: Could not resolve hostname"]),
    ],
)
def test_a_host_that_cannot_be_reached_is_named_and_nothing_is_started(place, line, told):
    hosts = place.hostfile(f"host-0 slots=1\nhost-1 slots=1\n{line}\n")
    begun = time.monotonic()
    ended = place.run("--hostfile", hosts, script(place.folder, REPORT))
    assert time.monotonic() - begun < 13
    assert ended.code == 1
    assert ended.out == ""
    for words in [*told, "Nothing was started"]:
        assert words in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_troubles_of_several_hosts_are_told_together(place):
    hosts = place.hostfile("host-0 slots=1\nbad-1 slots=1\nbad-2 slots=1\n")
    ended = place.run("--hostfile", hosts, script(place.folder, REPORT))
    assert ended.code == 1
    assert "cannot use 2 of 3 hosts. Nothing was started." in ended.err
    assert "\n  host bad-1: " in ended.err
    assert "\n  host bad-2: " in ended.err


def test_what_ssh_says_of_unknown_and_refused_keys_is_shown(place):
    hosts = place.hostfile("host-0 slots=1\nhost-1 slots=1\n")
    known = place.server.folder / "known_hosts"
    content = known.read_text()
    known.write_text("")
    ended = place.run("--hostfile", hosts, script(place.folder, REPORT))
    assert "Host key verification failed" in ended.err, ended.err
    known.write_text(content)
    (place.server.folder / "authorized_keys").write_text("")
    ended = place.run("--hostfile", hosts, script(place.folder, REPORT))
    assert "Permission denied (" in ended.err, ended.err


def test_ssh_to_this_machine_and_a_shell_that_prints(tmp_path):
    greeting = f"ForceCommand echo Welcome; exec {sys.executable} -m photinus.run.remote"
    with ssh_server(tmp_path, more=greeting) as server:
        (tmp_path / "hosts").write_text("localhost slots=1\nroot@127.0.0.1 slots=1\n")
        words = ["--ssh", server.ssh, "--hostfile", tmp_path / "hosts", "--master-port", "0"]
        ended = run_job(*words, script(tmp_path, REPORT), "gloo", cwd=tmp_path)
        assert ended.code == 0, ended.err
        found = reports(ended)
        assert [found[rank]["total"] for rank in range(2)] == [3, 3]
        assert {report["MASTER_ADDR"] for report in found.values()} == {"127.0.0.1"}
        command = [sys.executable, "-m", "photinus", "doctor", "--ssh", server.ssh, "--hosts"]
        said = subprocess.run(
            [*command, "localhost,root@127.0.0.1"], capture_output=True, text=True, timeout=60, check=True
        )
        assert "2 of 2 directions work" in said.stdout


OLD_REMOTE = """
import json, sys
from photinus.run.ssh.command import MARK
hello = {"photinus": "0.0.1", "address": None, "seen": None}
sys.stdout.buffer.write(MARK + json.dumps({"hello": hello}).encode() + b"\\n")
sys.stdout.flush()
sys.stdin.read()
"""

NO_TORCH = """
import runpy, sys
sys.modules["torch"] = None
runpy.run_module("photinus.run.remote", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ("/nowhere/python -m photinus.run.remote", "ssh exited with code 127: "),
        (
            f"{sys.executable} -c 'import photinus.nothing_of_the_kind'",
            "No module named 'photinus.nothing_of_the_kind'",
        ),
        (f"{sys.executable} OLD_REMOTE", "Photinus 0.0.1 is installed there, and "),
        (f"{sys.executable} NO_TORCH", "photinus run needs PyTorch, which"),
    ],
    ids=["no Python", "no Photinus", "another version", "no torch"],
)
def test_a_host_without_the_same_environment_is_told_so(tmp_path, answers, told):
    command = answers.replace("OLD_REMOTE", str(script(tmp_path, OLD_REMOTE, "old.py")))
    command = command.replace("NO_TORCH", str(script(tmp_path, NO_TORCH, "no_torch.py")))
    with two_hosts(tmp_path, f"ForceCommand {command}") as place:
        hosts = place.hostfile("host-0 slots=1\nhost-1 slots=1\n")
        begun = time.monotonic()
        ended = place.run("--hostfile", hosts, script(tmp_path, REPORT))
        assert time.monotonic() - begun < 10
    assert ended.code == 1
    assert "host host-1: " in ended.err
    assert told in ended.err


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ("", "cannot enter the folder {folder} (No such file or directory)"),
        ("work", "script {folder}/script.py does not exist"),
    ],
    ids=["folder", "script"],
)
def test_what_is_not_on_a_host_is_named_with_the_host(tmp_path, there, told):
    keys, hidden = tmp_path / "keys", tmp_path / "hidden"
    folder = hidden / "work"
    keys.mkdir()
    folder.mkdir(parents=True)
    # Where the second host's server runs, an empty file system lies over the folder's parent.
    hide = ["sh", "-c", 'mount -t tmpfs none "$1" && mkdir -p "$1/$2" && shift 2 && exec "$@"', "hide", hidden, there]
    with network_hosts(2) as (first, second), ssh_server(keys, host=second, before=list(map(str, hide))) as server:
        place = Place(first, second, server, folder)
        hosts = place.hostfile("host-0 slots=1\nhost-1 slots=1\n")
        ended = place.run("--hostfile", hosts, script(folder, REPORT))
    assert ended.code == 1
    assert f"host host-1: {told.format(folder=folder)}" in ended.err
    assert "Nothing was started" in ended.err


def test_a_taken_port_is_named_and_another_is_used_unless_one_was_asked_for(place):
    hosts = place.hostfile("host-0 slots=1\nhost-1 slots=1\n")
    holder = place.first.start(
        [sys.executable, "-c", f"import socket, time; s = socket.create_server(('{place.first.address}', 29500)); "
         "print(flush=True); time.sleep(1000)"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        ended = place.run("--hostfile", hosts, script(place.folder, REPORT))
        assert ended.code == 0, ended.err
        assert "port 29500 is taken on host-0; " in ended.err
        ended = place.run("--hostfile", hosts, "--master-port", "29500", script(place.folder, REPORT))
        assert ended.code == 1
        assert "host host-0: port 29500 of 192.168.78.1 is taken by " in ended.err
        ended = place.run("--hostfile", hosts, "--master-port", "0", script(place.folder, REPORT))
        assert ended.code == 0, ended.err
    finally:
        holder.kill()
        holder.communicate()


def test_doctor_examines_all_pairs_of_hosts(place):
    hosts = place.hostfile("host-0\nhost-1\n")
    command = [sys.executable, "-m", "photinus", "doctor", "--ssh", place.server.ssh]
    said = place.first.run([*command, "--hostfile", hosts])
    assert "host-0" in said
    assert "2 of 2 directions work" in said
    assert max(map(len, said.splitlines())) <= 80
    found = json.loads(place.first.run([*command, "--hosts", "host-0,host-1", "--json"]))
    assert found["well"]
    assert {(pair["source"], pair["target"]) for pair in found["pairs"]} == {("host-0", "host-1"), ("host-1", "host-0")}
    assert all(pair["bytes_per_s"] > 1e6 for pair in found["pairs"])


def test_doctor_names_a_host_that_it_cannot_reach_and_examines_the_others(place):
    command = [sys.executable, "-m", "photinus", "doctor", "--ssh", place.server.ssh]
    asked = place.first.start(
        [*command, "--json", "--hosts", "host-0,nowhere,host-1"], stdout=subprocess.PIPE, text=True
    )
    said, _ = asked.communicate(timeout=60)
    assert asked.returncode == 1
    found = {each["name"]: each for each in json.loads(said)["findings"]}
    assert found["nowhere"]["value"].startswith("ssh exited with code 255: ssh: Could not resolve hostname nowhere")
    assert found["nowhere"]["advice"].startswith("Try by hand: ssh ")
    assert found["not measured"]["value"] == "to and from nowhere"
    assert [found[name]["state"] for name in ("host-0", "host-1", "all")] == ["good"] * 3
    assert found["all"]["value"].startswith("2 of 2 directions work")


def test_doctor_names_a_host_that_does_not_reach_the_first_and_measures_the_others(tmp_path):
    with network_hosts(3) as (first, second, third):
        second.run(["ip", "route", "add", "unreachable", f"{third.address}/32"])
        with ssh_server(tmp_path, host=second) as server, ssh_server(tmp_path, host=third):
            command = [sys.executable, "-m", "photinus", "doctor", "--json", "--timeout", "20", "--ssh", server.ssh]
            asked = first.start([*command, "--hosts", "host-1,host-0,host-2"], stdout=subprocess.PIPE, text=True)
            said, _ = asked.communicate(timeout=120)
    assert asked.returncode == 1
    found = {each["name"]: each for each in json.loads(said)["findings"]}
    assert found["host-2"]["value"] == "it does not reach host-1, where the hosts meet"
    assert "Let TCP pass on all ports" in found["host-2"]["advice"]
    assert found["all"]["value"].startswith("2 of 2 directions work")


def test_doctor_names_hosts_that_do_not_reach_each_other(tmp_path):
    with network_hosts(3) as (first, second, third):
        second.run(["ip", "route", "add", "unreachable", f"{third.address}/32"])
        with ssh_server(tmp_path, host=second) as server, ssh_server(tmp_path, host=third):
            command = [sys.executable, "-m", "photinus", "doctor", "--ssh", server.ssh]
            command += ["--hosts", ",".join(host.name for host in (first, second, third))]
            asked = first.start(command, stdout=subprocess.PIPE, text=True)
            said, _ = asked.communicate(timeout=60)
    print(said)
    assert asked.returncode == 1
    assert "its host does not answer (no route to host)" in " ".join(said.split())
    assert "4 of 6 directions work" in said
    assert "2 of 6 need attention: host-1 to host-2, host-2 to host-1." in said
    assert max(map(len, said.splitlines())) <= 80
