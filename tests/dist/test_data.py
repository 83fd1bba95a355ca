"""The loader on several ranks takes its place from torch.distributed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import chain
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import TensorDataset

from photinus.trainer.data.loader import loader
from tests.fork_server import REPOSITORY
from tests.ranks import run_ranks, values

SAMPLES = 40


def seen(rank: int, world_size: int, workers: int) -> Any:
    dataset: Any = TensorDataset(torch.arange(SAMPLES)) if not workers else [(index,) for index in range(SAMPLES)]
    train = loader(dataset, batch_size=12, seed=3, drop_last=False, num_workers=workers)
    valid = loader(dataset, batch_size=12, train=False, num_workers=workers)
    first = [batch.data[0].tolist() for batch in train.epoch(1)]
    resumed = [batch.data[0].tolist() for batch in train.epoch(1, start=2)]
    assert resumed == first[2:]
    mean = sum(batch.weight * batch.data[0].double().mean() for batch in train.epoch(1, start=2))
    torch.distributed.all_reduce(mean)
    return first, [x for (batch,) in valid for x in batch.tolist()], float(mean) / world_size


def run(world_size: int, workers: int = 0) -> list[Any]:
    call = "tests.dist.test_data:seen"
    return values(run_ranks(call, world_size=world_size, backend="gloo", arguments={"workers": workers}))


def test_two_and_three_ranks_take_the_same_global_batches_and_agree_on_the_mean() -> None:
    by_world_size = {}
    for world_size, workers in ((2, 1), (3, 0)):
        ranks = run(world_size, workers)
        by_world_size[world_size] = [sorted(chain(*parts)) for parts in zip(*(rank[0] for rank in ranks), strict=True)]
        assert sorted(sample for rank in ranks for sample in rank[1]) == list(range(SAMPLES))
        # The last batch has 4 samples: 2 ranks split it evenly, 3 do not. Weighted, the mean over ranks is exact.
        exact = sum(sum(batch) / len(batch) for batch in by_world_size[world_size][2:])
        assert all(abs(rank[2] - exact) < 1e-9 for rank in ranks)
    assert by_world_size[2] == by_world_size[3]
    assert sorted(chain(*by_world_size[2])) == list(range(SAMPLES))


class ReportsItsProcess:
    """Each sample is the number of the process that loaded it; later samples never come."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index >= 4:
            time.sleep(300)
        return os.getpid()


def loads_for_ever() -> None:
    batches = loader(ReportsItsProcess(), batch_size=1, shuffle=False, num_workers=2)
    for number, pid in enumerate(batches):
        print(int(pid), flush=True)
        if number == 3:
            time.sleep(300)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's help is Linux's")
def test_workers_die_with_a_killed_rank_at_once() -> None:
    """torch's own workers would live on for several seconds, holding the rank's sockets open."""
    code = "from tests.dist.test_data import loads_for_ever; loads_for_ever()"
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    try:
        assert rank.stdout is not None
        workers = [psutil.Process(pid) for pid in {int(rank.stdout.readline()) for _ in range(4)}]
        assert len(workers) == 2
        assert {worker.ppid() for worker in workers} == {rank.pid}
        rank.send_signal(signal.SIGKILL)
        rank.wait(timeout=30)
        _, alive = psutil.wait_procs(workers, timeout=3)
        assert not [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE]
    finally:
        rank.kill()
        rank.wait()
        rank.stdout.close()
