"""Quotas and out-of-memory kills, read from made-up trees of both control group versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from photinus.job.cgroup import OomKills, cpu_quota_cores, free_memory, oom_kills, oom_since


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = {
    "proc/self/cgroup": "0::/user/job\n",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
}
V1 = {
    "proc/self/cgroup": "9:name=systemd:/\n4:memory:/box/a\n3:cpu,cpuacct:/box/a\n0::/\n",
    "proc/self/mountinfo": (
        "40 23 0:30 /box /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 23 0:31 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    ),
}


def test_version_2_quota_is_the_tightest_of_the_group_and_those_around_it(tmp_path):
    files = {"sys/fs/cgroup/user/job/cpu.max": "max 100000\n", "sys/fs/cgroup/user/cpu.max": "250000 100000\n"}
    assert cpu_quota_cores(tree(tmp_path, {**V2, **files})) == 2.5


def test_a_mount_whose_path_is_no_utf_8_is_passed_over(tmp_path):
    tree(tmp_path, {**V2, "sys/fs/cgroup/user/job/cpu.max": "150000 100000\n"})
    mounts = tmp_path / "proc/self/mountinfo"
    mounts.write_bytes(b"29 23 0:9 / /mnt/gr\xf6\xdfe rw - vfat /dev/sda1 rw\n" + mounts.read_bytes())
    assert cpu_quota_cores(tmp_path) == 1.5


def test_version_1_quota(tmp_path):
    files = {
        "sys/fs/cgroup/cpu,cpuacct/box/a/cpu.cfs_quota_us": "150000\n",
        "sys/fs/cgroup/cpu,cpuacct/box/a/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
    }
    assert cpu_quota_cores(tree(tmp_path, {**V1, **files})) == 1.5


@pytest.mark.parametrize("files", [{}, V2, V1])
def test_no_quota_anywhere(tmp_path, files):
    assert cpu_quota_cores(tree(tmp_path, files)) is None


def test_version_2_out_of_memory_kills_and_limit(tmp_path):
    files = {
        "sys/fs/cgroup/user/job/memory.events": "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n",
        "sys/fs/cgroup/user/job/memory.max": "734003200\n",
    }
    root = tree(tmp_path, {**V2, **files})
    limit = 734003200
    assert oom_kills(root) == OomKills(2, "this control group", limit)
    assert oom_since(OomKills(1, "", limit), root) == "it struck once in this control group (memory limit 700 MiB)"
    assert oom_since(OomKills(2, "", limit), root) == ""


def test_version_1_out_of_memory_kills_below_a_mount_that_shows_part_of_the_tree(tmp_path):
    files = {
        "sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert oom_kills(tree(tmp_path, {**V1, **files})) == OomKills(5, "this control group", None)


def test_the_root_group_has_no_counter_so_the_machines_is_read(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "proc/vmstat": "pgfault 1\noom_kill 7\n"}
    root = tree(tmp_path, {**V2, **files})
    assert oom_kills(root) == OomKills(7, "this machine")
    assert oom_since(OomKills(5, ""), root) == "it struck 2 times in this machine"


def test_a_kernel_that_says_nothing(tmp_path):
    assert oom_kills(tmp_path) is None
    assert oom_since(None, tmp_path) == ""


def test_this_kernel_can_be_read():
    assert oom_kills() is not None or "oom_kill" not in Path("/proc/vmstat").read_text()
    quota = cpu_quota_cores()
    assert quota is None or quota > 0


def test_free_memory_is_the_least_that_machine_and_groups_leave(tmp_path):
    files = {
        "proc/meminfo": "MemTotal: 8000 kB\nMemAvailable:       5000 kB\n",
        "sys/fs/cgroup/user/memory.max": "4000000\n",
        "sys/fs/cgroup/user/memory.current": "3000000\n",
        "sys/fs/cgroup/user/memory.stat": "anon 1\ninactive_file 500000\n",
        "sys/fs/cgroup/user/job/memory.max": "max\n",
    }
    assert free_memory(tree(tmp_path / "limited", {**V2, **files})) == 1_500_000
    assert free_memory(tree(tmp_path / "free", {"proc/meminfo": files["proc/meminfo"]})) == 5000 * 1024
