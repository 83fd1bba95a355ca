"""What a reducer does with a GPU's streams. Here they are numbers: which one is current is said by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from photinus.parallel.ddp.ddp import DistributedDataParallel
from photinus.parallel.reducer import buckets
from photinus.parallel.reducer.autograd import StreamWatch, sent_to, streams_of
from photinus.parallel.reducer.buckets import Bucket


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Launches:
    """An exchange that notes how many gradients had come when each bucket was launched."""

    averages = True

    def __init__(self) -> None:
        self.came = 0
        self.at: list[int] = []

    def start(self, bucket: Bucket) -> Any:
        self.at.append(self.came)
        work: Any = torch.futures.Future[None]()  # type: ignore[no-untyped-call]
        work.set_result(None)
        return work


@pytest.mark.parametrize(
    ("streams", "launched_at"),
    [
        ([7, 7, 7, 7], [1, 2, 3, 4]),  # each bucket as soon as it is complete
        ([7, 7, 8, 8], [1, 2, 4, 4]),  # the rest at the end, when the caller's stream waits for all others
        ([7, 8, 7, 7], [1, 4, 4, 4]),
    ],
)
def test_gradients_on_a_second_stream_are_launched_when_backward_is_over(
    alone: None, streams: list[int], launched_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []  # gradients whose memory is kept until this stream has read them
    monkeypatch.setattr(buckets, "keep_until_read", kept.append)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1)) for _ in range(4)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=1 / (1 << 20))  # a bucket for each parameter
    launches = Launches()
    current = {"stream": 0}
    ddp.reducer._streams = StreamWatch(lambda: current["stream"])

    def arrives(number: int) -> Any:
        def hook(_: torch.Tensor) -> None:
            launches.came = number + 1
            current["stream"] = streams[number]

        return hook

    for number, parameter in enumerate(reversed(list(model))):
        parameter.register_post_accumulate_grad_hook(arrives(number))  # before the reducer's own
    ddp.reducer.use_exchange(launches)
    for _ in range(2):  # the second round begins anew
        launches.at.clear()
        total: Any = model[0] * 0
        for parameter in model:
            total = total + parameter
        total.backward()
        assert sorted(launches.at) == launched_at
        assert not ddp.reducer._open
    assert bool(kept) == (len(set(streams)) > 1)


def test_the_cpu_has_no_streams_to_watch() -> None:
    assert streams_of(torch.device("cpu")) is None
    assert sent_to(torch.device("cpu"), [True, False], torch.int32).tolist() == [1, 0]
