"""The parts of DistributedDataParallel that need no other process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from photinus.errors import PhotinusError, UnsuitableModelError
from photinus.parallel.ddp.buffer_sync import _Arrival
from photinus.parallel.ddp.checks import buffer_sync_options, capacities
from photinus.parallel.exchange.collectives import wait_all
from photinus.parallel.reducer.buckets import Bucket, Slot, assign_buckets, bring_home
from photinus.parallel.reducer.checks import missing_text
from photinus.parallel.reducer.timeline import Timeline
from photinus.parallel.reducer.used_parameters import StaticGraph


def specs(*elems: int) -> list[torch.Tensor]:
    return [torch.empty(n, device="meta") for n in elems]


def bucket_of(*shapes: tuple[int, ...]) -> Bucket:
    slots = [Slot(i, f"p{i}", torch.nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
    (plan,) = assign_buckets([slot.parameter for slot in slots], cap_bytes=10**6)
    return Bucket(0, plan, [slots[i] for i in plan.parameters], lambda n, dtype: torch.zeros(n, dtype=dtype))


def test_each_bucket_has_its_own_cap_and_the_last_cap_goes_on() -> None:
    plans = assign_buckets(specs(*[16] * 8), cap_bytes=10**6, caps_bytes=[64, 128])
    assert [len(plan.parameters) for plan in plans] == [1, 2, 2, 2, 1]


def test_without_alignment_gradients_are_packed() -> None:
    (plan,) = assign_buckets(specs(3, 5), cap_bytes=10**6, alignment_bytes=1)
    assert plan.offsets == (0, 5)
    assert plan.elems == 8


def test_a_bucket_moves_only_when_somebody_else_holds_its_memory() -> None:
    bucket = bucket_of((4,), (3, 2))
    for slot in bucket.slots:
        slot.parameter.grad = torch.ones_like(slot.parameter)
    bring_home(bucket.slots, as_views=False)
    assert not bucket.make_writable()
    kept = bucket.slots[0].parameter.grad.view(-1)[:1]
    bucket.slots[0].parameter.grad = None
    assert bucket.make_writable()
    bucket.flat.fill_(7)
    assert kept.item() == 1
    assert bucket.slots[1].parameter.grad.eq(7).all(), "an accumulated gradient moves along"
    del kept
    assert not bucket.make_writable()


def test_a_static_graph_counts_gradients_and_refuses_one_more() -> None:
    slot = Slot(0, "layer.weight", torch.nn.Parameter(torch.zeros(1)))
    timeline = Timeline()
    graph = StaticGraph(0, timeline)
    assert graph.completes(slot)
    slot.arrivals = 2
    graph.learn([slot])
    for slot.arrivals in (1, 2):
        assert graph.completes(slot) == (slot.arrivals == 2)
    slot.arrivals = 3
    with pytest.raises(PhotinusError, match=r"layer\.weight got 2 gradients in the first backward"):
        graph.completes(slot)
    assert "has changed" in timeline.error


def test_the_timeline_keeps_ten_iterations_and_then_every_so_many() -> None:
    timeline = Timeline(sample_rate=4)
    kept = []
    for _ in range(20):
        timeline.forward_began()
        for moment in ("backward", "exchange", "backward_end", "exchange_end"):
            timeline.note(moment)
        kept.append(timeline.iteration)
    assert kept == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 12, 12, 12, 12, 16, 16, 16, 16]
    assert timeline.averages["avg_forward_compute_time"] >= 1


def test_the_first_error_is_raised_after_the_others_were_let_go() -> None:
    waited: list[str] = []

    class Work:
        def __init__(self, name: str, error: Exception | None = None) -> None:
            self.name, self.error = name, error

        def wait(self) -> None:
            waited.append(self.name)
            if self.error:
                raise self.error

        def is_completed(self) -> bool:
            return self.name != "pending"

    done: list[int] = []
    with pytest.raises(KeyError):
        wait_all([Work("a"), None, Work("b", KeyError("b")), Work("pending"), Work("c")], done.append)
    assert waited == ["a", "b", "c"]
    assert done == [0]


def test_missing_gradients_are_told_with_module_names_and_advice() -> None:
    slots = [Slot(3, "encoder.layers.2.weight", torch.nn.Parameter(torch.zeros(2, 3)))]
    text = missing_text(1, slots, 9, "Encoder")
    for part in ("rank 1", "1 of 9", "Encoder", "encoder.layers.2.weight [2, 3]", "belong to encoder.layers.2."):
        assert part in text
    assert "find_unused_parameters=True" in text


def test_capacities_and_buffer_options() -> None:
    assert capacities(None, None) == (25 * 2**20, [])
    assert capacities(None, [1, 0.5]) == (2**20, [2**20, 2**19])
    assert capacities(np.float32(0.5), None) == (2**19, [])  # type: ignore[arg-type]
    with pytest.raises(UnsuitableModelError, match="bucket_cap_mb_list"):
        capacities(None, [1, 0])
    with pytest.raises(UnsuitableModelError, match=r"bucket_cap_mb='25'.*needs a size in MiB"):
        capacities("25", None)  # type: ignore[arg-type]
    assert buffer_sync_options(None, None) == (True, True)
    assert buffer_sync_options(None, False) == (False, True)
    with pytest.warns(FutureWarning, match="forward_sync_buffers"):
        assert buffer_sync_options(False, None) == (False, False)


class OnGpu(torch.Tensor):
    """A CPU tensor that says it lies on a GPU."""

    is_cuda = True


def test_buffers_of_a_gpu_arrive_without_a_comparison_for_which_the_host_would_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = SimpleNamespace(rank=lambda: 1)
    places = [torch.ones(3), torch.tensor(7), torch.full((2, 2), 5.0)]
    buffers: list[torch.Tensor] = [torch.zeros_like(each).as_subclass(OnGpu) for each in places]
    work = SimpleNamespace(wait=lambda: True, is_completed=lambda: True)
    staging: Any = SimpleNamespace(places=places, group=group, start=lambda tensors, source: work)
    versions = [buffer._version for buffer in buffers]
    monkeypatch.delattr(torch, "equal")
    _Arrival(staging, buffers, 0).wait()
    assert all(bool((buffer == place).all()) for buffer, place in zip(buffers, places, strict=True))
    assert [buffer._version for buffer in buffers] == versions, "a graph that is kept would say that they changed"
