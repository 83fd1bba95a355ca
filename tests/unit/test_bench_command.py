"""`photinus bench`: its flags, its table, what it says about limits, and a real run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from photinus.cli.main import main
from photinus.errors import UsageError
from photinus.tools import bench
from photinus.tools.bench import Measurement, bus_factor, choose, limits, parser, print_table, size_name
from photinus.tools.doctor.plan import COPY, Plan
from photinus.tools.doctor.rounds import measure

MIB = 1 << 20
Capture = pytest.CaptureFixture[str]


def result(size: int, operation: str = "all_reduce", **microseconds: float) -> Measurement:
    return Measurement(operation, size, "float32", 2, {name: us * 1e-6 for name, us in microseconds.items()})


# ---- flags


def test_flags_with_dashes_underscores_and_equal_signs() -> None:
    options = parser().parse(
        ["--nproc_per_node=4", "--ops", "all_gather,all_reduce", "--sizes", "512,4K,1MiB", "--json"]
    )
    assert (options.ranks, options.operations) == (4, ("all_gather", "all_reduce"))
    assert (options.sizes_bytes, options.as_json, options.dtype) == ((512, 4096, MIB), True, "float32")


def test_by_default_sizes_go_from_4_kib_to_64_mib() -> None:
    options = parser().parse([])
    assert (options.sizes_bytes[0], options.sizes_bytes[-1], len(options.sizes_bytes)) == (4096, 64 * MIB, 8)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--opps", "x"], "Did you mean --ops?"),
        (["--ops", "allreduce"], "Did you mean all_reduce?"),
        (["--backends", "mvapich"], "mvapich is not one of photinus, gloo"),
        (["--sizes", "big"], "needs sizes like 512, 4K"),
        (["--sizes", "0"], "at least 1 byte"),
        (["--nproc-per-node", "1.5"], "a whole number, 2 to 1024"),
        (["--nproc-per-node", "99999"], "a whole number, 2 to 1024"),
        (["--seconds", "0"], "a number of seconds above 0"),
        (["--dtype"], "--dtype needs a value"),
    ],
)
def test_wrong_use_is_told_before_anything_is_measured(words: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        parser().parse(words)


# ---- figures


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [("all_reduce", 2, 1.0), ("all_reduce", 4, 1.5), ("all_gather", 4, 0.75), ("broadcast", 4, 1.0)],
)
def test_bus_bandwidth_counts_what_each_rank_moves(operation: str, ranks: int, factor: float) -> None:
    assert bus_factor(operation, ranks) == factor


def test_the_table_has_a_block_for_each_backend(capsys: Capture) -> None:
    results = [
        result(MIB, photinus=100.0, gloo=200.0, copy=50.0),
        result(4 * MIB, photinus=400.0, gloo=4000.0, copy=1.0),
    ]
    print_table(results, ["photinus", "gloo"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["photinus", "gloo", "copy"]
    assert lines[2].split() == ["1", "MiB", "all_reduce", "100.0", "10.49", "10.49", "200.0", "5.24", "5.24", "21.0"]
    assert lines[3].split() == ["4", "MiB", "all_reduce", "400.0", "10.49", "10.49", "4000", "1.05", "1.05", "4194.3"]


def test_sizes_have_short_names() -> None:
    assert [size_name(size) for size in (8, 4096, 3 * MIB // 2, 1 << 30)] == ["8 B", "4 KiB", "1.5 MiB", "1 GiB"]


def test_limits_tell_latency_memory_and_sockets_apart() -> None:
    results = [
        result(4096, photinus=10.0, gloo=500.0, copy=1.0),
        result(MIB, photinus=40.0, gloo=800.0, copy=30.0),
        result(64 * MIB, photinus=5000.0, gloo=40000.0, copy=4000.0),
    ]
    small, large = limits(results, "photinus")
    assert small == "photinus: up to 4 KiB the limit is the 10 µs that a call of any size takes."
    assert large == "photinus: at 64 MiB it runs at 80% of the speed of a copy: memory is the limit."
    small, large = limits(results, "gloo")
    assert "up to 1 MiB" in small
    assert "10% of the speed of a copy: its own work" in large


def test_only_a_backend_that_has_sockets_is_told_that_they_hold_it_up() -> None:
    slow = [result(4096, photinus=10.0, gloo=10.0, nccl=10.0, ucc=10.0, copy=1.0)]
    slow += [result(64 * MIB, photinus=40000.0, gloo=40000.0, nccl=40000.0, ucc=40000.0, copy=4000.0)]
    told = {backend: limits(slow, backend)[1] for backend in ("photinus", "gloo", "nccl", "ucc")}
    assert [backend for backend, line in told.items() if "sockets" in line] == ["gloo"]
    assert "waiting for the other ranks" in told["photinus"]


def test_two_backends_fit_a_terminal_of_80_columns_and_four_lose_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    slow = {"photinus": 1234567.0, "gloo": 12345678.0}
    print_table([result(256 * MIB, **slow, copy=50.0)], ["photinus", "gloo"])
    assert max(len(text.rstrip()) for text in capsys.readouterr().out.splitlines()) <= 80
    print_table(
        [result(256 * MIB, **slow, nccl=7654321.0, ucc=7654321.0, copy=50.0)], ["photinus", "gloo", "nccl", "ucc"]
    )
    shown = capsys.readouterr().out
    assert "12345678" in shown
    assert shown.count("7654321") == 2


def test_the_choice_is_the_fastest_near_a_gradient_bucket_and_says_why() -> None:
    results = [result(4096, photinus=90.0, gloo=30.0), result(16 * MIB, photinus=1000.0, gloo=8000.0)]
    best, reason = choose(results, ["gloo", "photinus"])
    assert best == "photinus"
    assert reason.startswith("8.0 × as fast as gloo at 16 MiB")
    assert reason.endswith("(for single small tensors gloo is faster)")


def test_a_backend_alone_is_chosen_as_the_only_one() -> None:
    assert choose([result(MIB, gloo=100.0)], ["gloo"])[1].startswith("it is the only one")


# ---- real runs


@pytest.mark.seconds
def test_a_run_measures_every_operation_over_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--nproc-per-node", "2", "--sizes", "4K,64K", "--seconds", "0.03", "--json"]
    operations = "all_reduce,reduce_scatter,all_gather,broadcast,all_to_all"
    assert main([*words, "--ops", operations]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(each["operation"], each["bytes"]) for each in told["results"]] == [
        (operation, size) for operation in operations.split(",") for size in (4096, 65536)
    ]
    for each in told["results"]:
        assert set(each["seconds"]) == {"photinus", "gloo", COPY}
        assert all(seconds > 0 for seconds in each["seconds"].values())
    assert told["choose"] in ("photinus", "gloo")


@pytest.mark.slow
def test_a_backend_that_fails_is_left_out_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--nproc-per-node", "2", "--sizes", "4K", "--seconds", "0.01"]
    assert main([*words, "--backends", "photinus,ucc"]) == 1
    shown = capsys.readouterr().out
    assert "ucc: did not take part: rank" in shown
    assert "Choose photinus: it is the only one" in shown


@pytest.mark.slow
def test_no_backend_at_all_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--nproc-per-node", "2", "--sizes", "4K", "--backends", "ucc"]) == 1
    assert "ucc failed: rank" in capsys.readouterr().err


@pytest.mark.seconds
def test_ranks_that_get_on_too_slowly_are_ended_at_the_deadline() -> None:
    found, absent = measure(Plan(("gloo", COPY), (("all_reduce", 4096),), timeout_s=0.01), 2)
    assert found == []
    assert absent["gloo"].startswith("no answer within 0.01 s (")


@pytest.mark.slow
def test_a_bench_that_is_killed_leaves_no_rank_and_no_file(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "photinus", "bench", "--nproc-per-node", "2", "--sizes", "16M", "--seconds", "60"]
    process = subprocess.Popen(words, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL)
    mark = f"TMPDIR={tmp_path}"
    wait_until(lambda: len(running(mark)) >= 4)  # itself, the launcher, and two ranks at least
    process.kill()
    process.wait()
    wait_until(lambda: not running(mark))
    assert list(tmp_path.iterdir()) == []


def running(mark: str) -> list[str]:
    """The processes with a variable in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().decode(errors="replace").split("\0"):
                found.append(folder.name)
    return found


def wait_until(fulfilled: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not fulfilled():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_torch_it_says_what_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(bench, "ask_torch", lambda timeout_s: (None, "No module named 'torch'"))
    assert main(["bench"]) == 1
    assert "photinus bench needs PyTorch: No module named 'torch'" in capsys.readouterr().err
