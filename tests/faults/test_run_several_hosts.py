"""`photinus run` on two hosts (network namespaces): hosts that come, go, are cut off, or have other clocks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.dist.test_run import DEADLINE_S, Ended, script
from tests.dist.test_run_hosts import NOTE, notes
from tests.faults.test_run_end import alive
from tests.netns import NetworkHost, network_hosts

pytestmark = pytest.mark.slow
PORT = 29500
TRAIN = (
    NOTE
    + """
import torch, torch.distributed as dist
dist.init_process_group("photinus")
groups = [None, dist.new_group(backend="gloo")]
step = torch.zeros(1)
while True:
    for group in groups:
        total = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(total, group=group)
        assert total.item() == sum(range(1, dist.get_world_size() + 1))
    step += 1
    (folder / f"step-{os.environ['RANK']}").write_text(str(int(step)))
    stop = torch.tensor([float((folder / "stop").exists())])
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if step.item() == 3:
        mark = f"trains-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}-{os.environ['PHOTINUS_ATTEMPT']}"
        (folder / mark).write_text("yes")
    if stop.item():
        break
    time.sleep(0.02)
dist.destroy_process_group()
"""
)


class HostJob:
    """A launcher on one of the hosts. Its output goes to a file: nothing blocks when nobody reads."""

    def __init__(self, host: NetworkHost, folder: Path, words: Sequence[object], **environ: str) -> None:
        self.host = host
        self.output = folder / f"{host.name}-{time.monotonic_ns()}.txt"
        with self.output.open("wb") as file:
            self.process = host.start(
                [sys.executable, "-m", "photinus", "run", *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                # A host that is killed whole, guard and all, leaves its folder.
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PHOTINUS_HOST_ID": host.name,
                    "TMPDIR": str(folder),
                    **environ,
                },
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def end(self) -> Ended:
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the launcher on {self.host.name} did not end in time\n{self.text}") from None
        return Ended(code, self.text, self.text)


@pytest.fixture
def hosts() -> Iterator[tuple[NetworkHost, ...]]:
    with network_hosts(2) as made:
        yield made


def launch(
    hosts: Sequence[NetworkHost],
    index: int,
    folder: Path,
    *words: object,
    nnodes: str,
    restarts: int = 0,
    **more: str,
) -> HostJob:
    flags = ["--nnodes", nnodes, "--master-addr", hosts[0].name, "--nproc-per-node", 2, "--cpu"]
    flags += ["--max-restarts", restarts]
    return HostJob(hosts[index], folder, [*flags, *words], **more)


def wait_until(jobs: Sequence[HostJob], *files: Path, within_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + within_s
    while not all(file.exists() for file in files):
        missing = [file.name for file in files if not file.exists()]
        shown = "\n".join(f"----- {job.host.name}\n{job.text}" for job in jobs)
        assert time.monotonic() < deadline, f"{missing} awaited in vain\n{shown}"
        time.sleep(0.02)


def wait_for(job: HostJob, said: str, times: int = 1) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while job.text.count(said) < times:
        assert time.monotonic() < deadline, f"{said!r} awaited in vain on {job.host.name}\n{job.text}"
        time.sleep(0.05)


def trains(folder: Path, world_size: int, attempt: int) -> list[Path]:
    return [folder / f"trains-{rank}-of-{world_size}-{attempt}" for rank in range(world_size)]


def kill_host(job: HostJob) -> None:
    """Kills all processes of a host at once, as its power supply would."""
    for pid in job.host.pids():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    job.process.wait()


def assert_ended_well(*jobs: HostJob) -> None:
    for job in jobs:
        end = job.end()
        assert end.code == 0, f"{job.host.name}: {end.out}"


def test_the_same_command_on_two_hosts_trains_four_ranks_and_listens_between_them_only(hosts, tmp_path):
    path = script(tmp_path, TRAIN)
    jobs = [launch(hosts, index, tmp_path, path, tmp_path, nnodes="2") for index in (0, 1)]
    wait_until(jobs, *trains(tmp_path, 4, 0))
    found = notes(tmp_path)
    assert [(note["RANK"], note["GROUP_RANK"], note["LOCAL_RANK"]) for note in found] == [
        ("0", "0", "0"),
        ("1", "0", "1"),
        ("2", "1", "0"),
        ("3", "1", "1"),
    ]
    for host in hosts:
        listening = host.run([sys.executable, "-c", LISTENING, *map(str, host.pids())]).split()
        assert set(listening) <= {"127.0.0.1", host.address}, listening
    (tmp_path / "stop").write_text("now")
    assert_ended_well(*jobs)
    assert "2 hosts, 4 workers: host-0 (192.168.78.1) ranks 0 to 1, host-1 (192.168.78.2) ranks 2 to 3" in jobs[0].text
    assert "without a secret: every host that reaches the port can join" in jobs[0].text


LISTENING = """
import sys
from tests.dist.test_run_hosts import listeners_of
print(*(address for address, _ in listeners_of([int(pid) for pid in sys.argv[1:]])))
"""


def test_a_host_may_join_and_leave_a_job_that_says_so(hosts, tmp_path):
    path = script(tmp_path, TRAIN)
    conf = ["--rdzv-conf", "last_call_timeout=0.5"]
    first = launch(hosts, 0, tmp_path, *conf, path, tmp_path, nnodes="1:2")
    wait_until([first], *trains(tmp_path, 2, 0))
    second = launch(hosts, 1, tmp_path, *conf, path, tmp_path, nnodes="1:2")
    wait_until([first, second], *trains(tmp_path, 4, 1))
    assert "host host-1 (192.168.78.2) has joined" in first.text
    second.process.send_signal(signal.SIGTERM)
    assert second.end().code == 143
    begun = time.monotonic()
    wait_until([first], *trains(tmp_path, 2, 2))
    assert time.monotonic() - begun < 15
    assert "host host-1 (192.168.78.2) exited because of SIGTERM" in first.text
    (tmp_path / "stop").write_text("now")
    assert_ended_well(first)


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_lost_host_ends_a_job_of_a_fixed_number_within_ten_seconds(hosts, tmp_path, how):
    path = script(tmp_path, TRAIN)
    conf = ["--rdzv-conf", "heartbeat_timeout=5"]
    jobs = [launch(hosts, index, tmp_path, *conf, path, tmp_path, nnodes="2") for index in (0, 1)]
    wait_until(jobs, *trains(tmp_path, 4, 0))
    begun = time.monotonic()
    if how == "killed":
        kill_host(jobs[1])
    else:
        hosts[1].cut_off()
    end = jobs[0].end()
    assert time.monotonic() - begun < 10, end.out
    assert end.code == 1
    assert "the job ended: host host-1 (192.168.78.2) was lost: " in end.err
    if how == "cut off":
        other = jobs[1].end()
        assert time.monotonic() - begun < 12, other.out
        assert "the host that leads the job (host-0 port 29500) was lost: no sign of life for 5 s" in other.err
    assert not any(alive(int(note["pid"])) for note in notes(tmp_path))


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_lost_host_is_gone_on_without_where_hosts_may_go(hosts, tmp_path, how):
    path = script(tmp_path, TRAIN)
    conf = ["--rdzv-conf", "last_call_timeout=20,heartbeat_timeout=5"]
    jobs = [launch(hosts, index, tmp_path, *conf, path, tmp_path, nnodes="1:2") for index in (0, 1)]
    wait_until(jobs, *trains(tmp_path, 4, 0))
    begun = time.monotonic()
    if how == "killed":
        kill_host(jobs[1])
    else:
        hosts[1].cut_off()
    wait_until(jobs[:1], tmp_path / "0-1.json", within_s=12)
    took_s = time.monotonic() - begun
    assert took_s < 10, jobs[0].text
    wait_until(jobs[:1], *trains(tmp_path, 2, 1))
    assert "host host-1 (192.168.78.2) was lost: " in jobs[0].text
    left = jobs[:1]
    if how == "cut off":
        hosts[1].connect()
        wait_until(jobs, *trains(tmp_path, 4, 2))
        assert "host host-1 (192.168.78.2) has joined" in jobs[0].text
        left = jobs
    (tmp_path / "stop").write_text("now")
    assert_ended_well(*left)


AUDITED = (
    NOTE
    + """
import torch, photinus
from torch.nn.functional import cross_entropy
from tests.small_run import Net, points

with photinus.init(device="cpu", seed=3, logical_shards=4) as session:
    plain = Net()
    model, optimizer = photinus.wrap(plain, torch.optim.Adam(plain.parameters(), lr=0.01))
    loop = photinus.Loop(
        model, optimizer, points(96), batch_size=24, epochs=4, out=folder / "out", audit_every=1,
        save=photinus.Saving(every_steps=3),
    )
    wrong = session.world_size == 4 and session.rank == 3

    def flip(gradient):
        if wrong and loop.step == 6 and loop.micro_batch:
            gradient = gradient.clone()
            gradient.view(torch.int32)[0, 0] ^= 1 << 20
        return gradient

    plain[0].weight.register_hook(flip)
    for inputs, targets in loop:
        loop.backward(cross_entropy(model(inputs), targets))
        if loop.step_due:
            optimizer.step()
            optimizer.zero_grad()
"""
)


@pytest.mark.parametrize("nnodes", ["1:2", "2"])
def test_a_host_that_computes_wrong_is_named_and_gone_on_without_where_hosts_may_go(hosts, tmp_path, nnodes):
    path, root = script(tmp_path, AUDITED), str(Path(__file__).parents[2])
    jobs = [launch(hosts, index, tmp_path, path, tmp_path, nnodes=nnodes, PYTHONPATH=root) for index in (0, 1)]
    ends = [job.end() for job in jobs]
    assert [end.code for end in ends] == [0 if nnodes == "1:2" else 1, 1], ends
    wrong = "rank 3 (host host-1, cpu) computed other gradients of the same batch than ranks "
    assert f"FaultyHardwareError: audit of step 6: {wrong}" in ends[1].err
    assert "this host left the job: an audit found that it may compute wrong" in ends[1].err
    assert "host host-1 (192.168.78.2) left the job: an audit found that it may compute wrong" in ends[0].err
    if nnodes == "1:2":
        alone = tmp_path / "alone"
        alone.mkdir()
        assert HostJob(hosts[0], tmp_path, ["--cpu", path, alone], PYTHONPATH=root).end().code == 0
        verified = [sys.executable, "-m", "photinus", "verify", tmp_path / "out", alone / "out"]
        assert subprocess.run(verified, timeout=60).returncode == 0


def test_a_host_that_was_cut_off_too_long_costs_one_restart_and_comes_back(hosts, tmp_path):
    path = script(tmp_path, TRAIN)
    words = ["--rdzv-conf", "heartbeat_timeout=5", path, tmp_path]
    jobs = [launch(hosts, index, tmp_path, *words, nnodes="2", restarts=1) for index in (0, 1)]
    wait_until(jobs, *trains(tmp_path, 4, 0))
    hosts[1].cut_off()
    for job, said in zip(
        jobs,
        ("was lost: no sign of life for 5 s (restart 1 of 1)", "this host stops its workers and joins again"),
        strict=True,
    ):
        wait_for(job, said)
    hosts[1].connect()
    wait_until(jobs, *trains(tmp_path, 4, 1))
    kill_host(jobs[1])
    end = jobs[0].end()
    assert end.code == 1
    assert "the job ended: host host-1 (192.168.78.2) was lost: " in end.err  # no restart is left
    assert not any(alive(int(note["pid"])) for note in notes(tmp_path, attempt=1))


def test_a_link_that_is_cut_for_some_seconds_is_told_and_costs_nothing(hosts, tmp_path):
    path = script(tmp_path, TRAIN)
    jobs = [launch(hosts, index, tmp_path, path, tmp_path, nnodes="2") for index in (0, 1)]
    wait_until(jobs, *trains(tmp_path, 4, 0))
    for turn, (cut, seconds) in enumerate(zip(hosts, (5, 10), strict=True), 1):
        cut.cut_off()
        time.sleep(seconds)
        cut.connect()
        begun, step = time.monotonic(), int((tmp_path / "step-3").read_text())
        while int((tmp_path / "step-3").read_text() or 0) <= step + 5:
            assert all(job.process.poll() is None for job in jobs), [job.text for job in jobs]
            assert time.monotonic() - begun < DEADLINE_S
            time.sleep(0.1)
        for job in jobs:  # the workers' connections may be back before the launchers'
            wait_for(job, " is back after ", turn)
    (tmp_path / "stop").write_text("now")
    assert_ended_well(*jobs)
    for job, other in zip(jobs, ("host host-1 (192.168.78.2)", "the host that leads the job"), strict=True):
        assert job.text.count(f"no sign of life from {other} for 3 s; it counts as lost after 30 s") == 2, job.text
        assert job.text.count(f"{other} is back after ") == 2, job.text
        assert "shows signs of life again after" in job.text
    assert not notes(tmp_path, attempt=1)


def test_a_killed_leading_host_ends_the_other_within_ten_seconds_and_is_named(hosts, tmp_path):
    path = script(tmp_path, TRAIN)
    jobs = [launch(hosts, index, tmp_path, path, tmp_path, nnodes="1:2") for index in (0, 1)]
    wait_until(jobs, *trains(tmp_path, 4, 0))
    begun = time.monotonic()
    kill_host(jobs[0])
    end = jobs[1].end()
    assert time.monotonic() - begun < 10, end.out
    assert end.code == 1
    assert "host-0" in end.err.splitlines()[-1]


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long ahead(void) { const char *text = getenv("CLOCK_AHEAD_S"); return text ? atol(text) : 0; }
int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, now);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += ahead();
  return code;
}
int gettimeofday(struct timeval *now, void *zone) {
  static int (*real)(struct timeval *, void *);
  if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
  int code = real(now, zone);
  now->tv_sec += ahead();
  return code;
}
time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
"""


@pytest.mark.parametrize("ahead_s", [40, -3600])
def test_a_clock_that_differs_has_no_effect(hosts, tmp_path, ahead_s):
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True, timeout=60)
    path = script(tmp_path, TRAIN)
    jobs = [
        launch(hosts, 0, tmp_path, path, tmp_path, nnodes="1:2"),
        launch(hosts, 1, tmp_path, path, tmp_path, nnodes="1:2", LD_PRELOAD=str(library), CLOCK_AHEAD_S=str(ahead_s)),
    ]
    wait_until(jobs, *trains(tmp_path, 4, 0))
    (tmp_path / "stop").write_text("now")
    assert_ended_well(*jobs)
    assert {note["WORLD_SIZE"] for note in notes(tmp_path)} == {"4"}


def test_another_secret_is_refused_by_name_and_the_job_goes_on(hosts, tmp_path):
    path = script(tmp_path, TRAIN)
    first = launch(hosts, 0, tmp_path, path, tmp_path, nnodes="2", PHOTINUS_JOB_SECRET="one")
    stranger = launch(hosts, 1, tmp_path, "--rdzv-conf", "join_timeout=20", path, tmp_path, nnodes="2").end()
    assert stranger.code == 1
    assert (
        "host-0 port 29500 does not answer as the host that leads this job: this port belongs to a different job"
        in stranger.err
    )
    second = launch(hosts, 1, tmp_path, path, tmp_path, nnodes="2", PHOTINUS_JOB_SECRET="one")
    wait_until([first, second], *trains(tmp_path, 4, 0))
    (tmp_path / "stop").write_text("now")
    assert_ended_well(first, second)
    assert "without a secret" not in first.text
    assert not any(alive(pid) for job in (first, second) for pid in [job.process.pid])
