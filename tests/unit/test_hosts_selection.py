"""--include, --exclude, --num-nodes and --num-gpus mean what they mean for DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import pytest

from photinus.cli.flags import parse_run
from photinus.cli.selection import for_this_host, select
from photinus.errors import DeviceError, UsageError
from photinus.run.local.job import Job
from photinus.run.plan import place_on_gpus, plan
from photinus.run.ssh.hostfile import parse_hostfile

HOSTS = parse_hostfile("a slots=4\nb slots=4\nc slots=2\n", "hosts")


def chosen(**flags):
    """Host -> devices, or the number of workers where no devices were named."""
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    shares = select(HOSTS, parse_run(["--hostfile", "hosts", *words, "x.py"]))
    return {share.host.name: share.count if share.devices is None else share.devices for share in shares}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {"a": 4, "b": 4, "c": 2}),
        # DeepSpeed's documentation: all of one host, and two slots of another
        ({"include": "a@b:0,2"}, {"a": 4, "b": (0, 2)}),
        ({"include": "b:0,2@a"}, {"a": 4, "b": (0, 2)}),  # ranks follow the file's order
        ({"include": "a:2,0"}, {"a": (2, 0)}),  # devices follow the typed one
        ({"include": "a:1,1,3"}, {"a": (1, 3)}),
        ({"include": "a:1@a:3"}, {"a": (1, 3)}),
        ({"include": "a:1@a"}, {"a": 4}),
        ({"include": "a:0-2"}, {"a": (0, 1, 2)}),
        ({"exclude": "b:0"}, {"a": 4, "b": (1, 2, 3), "c": 2}),
        ({"exclude": "a:0,1@b"}, {"a": (2, 3), "c": 2}),
        ({"exclude": "c:0,1"}, {"a": 4, "b": 4}),  # nothing is left of c
        ({"exclude": "c:0@c:0"}, {"a": 4, "b": 4, "c": (1,)}),
        ({"num_nodes": 2}, {"a": 4, "b": 4}),
        ({"num_gpus": 2}, {"a": 2, "b": 2, "c": 2}),
        ({"num_nodes": 2, "num_gpus": 3}, {"a": 3, "b": 3}),
    ],
)
def test_hosts_and_devices_that_are_chosen(flags, expected):
    found = chosen(**flags)
    assert found == expected
    assert list(found) == list(expected)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"include": "aa:0"}, "--include aa:0: host aa is not in the host file. Did you mean a?"),
        ({"include": "node9"}, "host node9 is not in the host file. It names a, b, c."),
        ({"include": "c:2"}, "c has no slot 2; hosts:3 has slots=2, which are numbered 0 to 1"),
        ({"exclude": "a:4"}, "a has no slot 4"),
        ({"exclude": "a@b@c"}, "--exclude a@b@c leaves no devices"),
        ({"include": "a:"}, "'' is not a device"),
        ({"include": "a:x"}, "'a:x' is not valid"),
        ({"include": "a:3-1"}, "'3-1' is not a device"),
        ({"include": "a@@b"}, "'' is not valid. Give hosts with or without devices, like a:0,1@b"),
        ({"include": "a", "exclude": "b"}, "--include a and --exclude b are mutually exclusive"),
        ({"include": "a", "num_gpus": 2}, "--include a and --num-gpus 2 are mutually exclusive"),
        ({"exclude": "a", "num_nodes": 2}, "--exclude a and --num-nodes 2 are mutually exclusive"),
        ({"num_nodes": 4}, "--num-nodes 4 needs 4 hosts, but hosts lists 3"),
        ({"num_gpus": 3}, "--num-gpus 3 needs 3 devices per host, but c has slots=2 (hosts:3)"),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_both_sides(flags, told):
    with pytest.raises(UsageError) as caught:
        chosen(**flags)
    assert told in str(caught.value)


def test_a_host_without_slots_takes_devices_by_number_but_not_all_except_some():
    hosts = parse_hostfile("a\n", "hosts")
    (share,) = select(hosts, parse_run(["-H", "hosts", "-i", "a:0,7", "x.py"]))
    assert share.devices == (0, 7)
    (share,) = select(hosts, parse_run(["-H", "hosts", "x.py"]))
    assert (share.devices, share.count) == (None, None)
    with pytest.raises(UsageError, match="hosts:1 does not list its number of slots: write `a slots=N`"):
        select(hosts, parse_run(["-H", "hosts", "-e", "a:0", "x.py"]))


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (["--nproc-per-node", "4"], (2, 0)),
        (["--nproc-per-node", "2"], (2,)),
        (["--nproc-per-node", "2", "--cpu"], (2, 0)),
        ([], (2, 0)),
    ],
)
def test_the_workers_that_are_asked_for_share_the_chosen_gpus_of_a_host(words, devices, monkeypatch):
    monkeypatch.setenv("PHOTINUS_RANKS_PER_GPU", "2")
    flags = parse_run(["--hostfile", "hosts", "--include", "a:2,0", *words, "x.py"])
    (share,) = select(HOSTS, flags)
    assert share.job(flags.spec).devices == devices


@pytest.mark.parametrize("workers", ["3", "6"])
def test_workers_that_do_not_fill_the_chosen_gpus_of_a_host_are_refused(workers):
    flags = parse_run(
        ["--hostfile", "hosts", "--include", "a:2,0", "--ranks-per-gpu", "2", "--nproc-per-node", workers, "x.py"]
    )
    (share,) = select(HOSTS, flags)
    with pytest.raises(UsageError, match=f"asks for {workers} workers .* a has 2 slots .*, for 2 workers each"):
        share.job(flags.spec)


def here(*words: str, gpus: int = 4) -> Job:
    """The job of this host; torch would see these GPUs without CUDA_VISIBLE_DEVICES."""
    flags = parse_run([*words, "--no-python", "true"])
    spec = replace(for_this_host(flags), choice=flags.typed("--include", "--exclude", "--num-gpus"))
    environ = {"PATH": os.defpath}

    def count_gpus(kind: str, environ: Mapping[str, str]) -> int:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        return gpus if visible is None else min(gpus, len(visible.split(",")))

    return place_on_gpus(plan(spec, environ), count_gpus, cores=lambda: 8)


@pytest.mark.parametrize(
    ("words", "same_as"),
    [
        (["--include", "localhost:1,2"], ["--device", "1,2"]),
        (["--include=localhost"], []),
        (["--include", "localhost:1@localhost:3"], ["--device", "1,3"]),
        (["--include", "localhost:1,2", "--cpu"], ["--nproc-per-node", "2", "--cpu"]),
        (["--exclude", "localhost:0,2"], ["--device", "1,3"]),
        (["--exclude", "localhost:0,2", "--cpu"], ["--nproc-per-node", "2", "--cpu"]),
        (["--num-gpus", "2"], ["--device", "0,1"]),
        (["--num_gpus=2", "--cpu"], ["--nproc-per-node", "2", "--cpu"]),
    ],
)
def test_without_a_host_file_they_choose_devices_of_this_host(words, same_as):
    job, same = here(*words), here(*same_as)
    assert job.local_world_size == same.local_world_size
    assert (job.base_environ, job.gpus, job.notes) == (same.base_environ, same.gpus, same.notes)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--include", "b:0"], "without --hostfile there is only localhost. List b in a file"),
        (["--exclude", "localhost"], "leaves no hosts: without --hostfile there is only this one"),
        (["--exclude", "localhost:0-3"], "--exclude localhost:0-3: none is left; torch sees 4 GPUs here"),
        (["--exclude", "localhost:4"], "--exclude localhost:4: there is no GPU 4; torch sees 4 GPUs here"),
        (["--include", "localhost:1,2", "--nproc-per-node", "3"], "chooses 2 devices, but --nproc-per-node 3"),
        (["--exclude", "localhost:1", "--nproc-per-node", "4"], "--exclude localhost:1 chooses 3 devices, but --nproc"),
        (
            ["--include", "localhost:1,2", "--nproc-per-node", "2", "--ranks-per-gpu", "2"],
            "chooses 2 devices for 2 workers each, but --nproc-per-node 2 asks for 2 workers",
        ),
    ],
)
def test_what_this_host_does_not_have_is_refused(words, told):
    with pytest.raises(UsageError) as caught:
        here(*words)
    assert told in str(caught.value)


def test_too_few_gpus_are_told_with_the_flag_that_asked_for_them():
    with pytest.raises(DeviceError) as caught:
        here("--num-gpus", "4", gpus=0)
    assert str(caught.value).startswith("--num-gpus 4 asks for GPUs: --device 0,1,2,3 names 4 GPUs, but torch sees 0")
