"""`photinus.compat.ray.launch` on a real Ray, started by the tests on this machine."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

import photinus.compat.ray
from photinus.errors import LaunchError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="needs Ray (pip install ray)")
    # Ray would leave its logs in /tmp/ray. Not in TMPDIR: the names of its sockets have 75 letters more than their
    # folder's, and sockets may have 107.
    with tempfile.TemporaryDirectory(prefix="photinus-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=folder)
            # The functions below travel by value: Ray's workers know nothing of this folder.
            import ray.cloudpickle as pickle

            pickle.register_pickle_by_value(sys.modules[__name__])
            yield
        finally:
            ray.shutdown()


def tell(factor: float, *, offset: float = 0.0) -> dict[str, Any]:
    import torch

    import photinus

    with photinus.init(device="cpu", timeout_s=60) as world:
        total = torch.tensor([world.rank * factor + offset])
        torch.distributed.all_reduce(total)
        return {
            "rank": world.rank,
            "local_rank": world.local_rank,
            "local_world_size": world.local_world_size,
            "sum": total.item(),
            "pid": os.getpid(),
            "meant": os.environ["PHOTINUS_WORLD_SIZE"],
        }


def test_a_function_is_called_on_every_rank_and_what_each_returns_comes_back_in_order(cluster: None):
    found = photinus.compat.ray.launch(tell, num_workers=2, args=(2.0,), kwargs={"offset": 1.0})
    assert [(each["rank"], each["local_rank"], each["local_world_size"]) for each in found] == [(0, 0, 2), (1, 1, 2)]
    assert [(each["sum"], each["meant"]) for each in found] == [(4.0, "2")] * 2
    for each in found:
        gone_within(each["pid"], 10.0)


def fail_on_rank_1() -> None:
    import torch

    import photinus

    with photinus.init(device="cpu", timeout_s=60) as world:
        if world.rank == 1:
            raise ValueError("no good data")
        torch.distributed.all_reduce(torch.zeros(1))


def test_the_rank_that_failed_first_is_named_with_its_error(cluster: None):
    with pytest.raises(
        LaunchError, match=r"rank 1 of 2 \(pid \d+ on \S+\) failed with ValueError: no good data"
    ) as error:
        photinus.compat.ray.launch(fail_on_rank_1, num_workers=2)
    assert 'raise ValueError("no good data")' in str(error.value)
    assert "Ranks [0] failed after it." in str(error.value)


def die_on_rank_0() -> None:
    import torch

    import photinus

    with photinus.init(device="cpu", timeout_s=60) as world:
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(torch.zeros(1))


def test_a_rank_whose_process_is_killed_is_named(cluster: None):
    with pytest.raises(LaunchError, match=r"rank 0 of 2 \(pid \d+ on \S+\) failed with ActorDiedError"):
        photinus.compat.ray.launch(die_on_rank_0, num_workers=2)


def test_a_cluster_without_room_says_what_was_asked_and_what_there_is(cluster: None):
    with pytest.raises(LaunchError, match=r"in 1 s for 9 workers of 1 CPU each \(strategy SPREAD\): it has 3 CPU"):
        photinus.compat.ray.launch(tell, num_workers=9, args=(1.0,), strategy="SPREAD", start_timeout_s=1.0)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_workers": True}, "num_workers=True"),
        ({"num_workers": 1, "strategy": "PILE"}, "strategy='PILE'"),
        ({"num_workers": 1, "gpus_per_worker": 2}, "one GPU or none"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused_before_any_work(options: dict[str, Any], complaint: str):
    with pytest.raises(ValueError, match=complaint):
        photinus.compat.ray.launch(tell, **options)


def gone_within(pid: int, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, f"process {pid} of a rank is left"
        time.sleep(0.05)
