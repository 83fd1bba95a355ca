"""CUDA tensors through backend photinus, without a GPU: CPU tensors over the driver that is none (tests.fake_cuda).

tests/gpu/test_photinus.py does the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.cuda_cases import LAYOUTS
from tests.fake_cuda import library
from tests.rank_pool import RankPool

SLOW_COPIES = " ".join(f"lasts=cuMemcpy{way}Async:{n}:5" for way in ("HtoD", "DtoH") for n in range(1, 300))


def ranks(folder: Path, world_size: int, words: str, kernel_s: float = 0.0) -> RankPool:
    library()  # once, not by each rank
    environ = {"STORE_OF_TEST": str(folder / "store"), "FAKE_CUDA": words, "FAKE_KERNEL_S": str(kernel_s)}
    return RankPool("tests.dist.cuda_cases:Cases", world_size=world_size, environ=environ)


@pytest.fixture(scope="module", params=[1, 2, pytest.param(3, marks=pytest.mark.slow)])
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with ranks(tmp_path_factory.mktemp("cuda"), request.param, "seed=1") as made:
        yield made


@pytest.fixture(scope="module", params=[1, 2])
def slow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Copies, the engine's and torch's, take long."""
    with ranks(tmp_path_factory.mktemp("slow"), request.param, SLOW_COPIES, 0.005) as made:
        yield made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_have_the_bits_of_the_cpu(pool: RankPool, layout: str) -> None:
    assert pool.ask({"do": "collectives", "layout": layout}) == [[]] * pool.world_size


@pytest.mark.parametrize("case", ["lazy", "sparse", "groups"])
def test_other_forms_have_the_results_of_the_cpu(pool: RankPool, case: str) -> None:
    assert pool.ask({"do": case}) == [[]] * pool.world_size


def test_streams_are_ordered_behind_results_without_the_host(slow: RankPool) -> None:
    assert slow.ask({"do": "streams", "repeats": 1}) == [[]] * slow.world_size


def test_memory_of_works_that_nobody_waits_for_is_not_reused_under_a_copy(slow: RankPool) -> None:
    assert slow.ask({"do": "dropped", "repeats": 40}) == [[]] * slow.world_size


def test_a_result_on_its_way_keeps_its_memory_when_its_work_is_gone(slow: RankPool) -> None:
    assert slow.ask({"do": "dropped_for_its_future"}) == [True] * slow.world_size


def test_memory_comes_back_with_the_wait(pool: RankPool) -> None:
    assert pool.ask({"do": "memory_comes_back"}) == [True] * pool.world_size


def test_works_say_when_their_results_are_there(pool: RankPool) -> None:
    assert pool.ask({"do": "completion"}) == [[True, True]] * pool.world_size


def test_loader_workers_may_be_forked_while_a_call_is_in_flight(pool: RankPool) -> None:
    assert pool.ask({"do": "loader_workers"}) == [[True, True]] * pool.world_size


def test_wrong_calls_are_refused_and_the_group_goes_on(pool: RankPool) -> None:
    for said in pool.ask({"do": "errors"}):
        assert "got one on cpu and one on cuda:0" in said["both"]
        assert "got one on cuda:1 and one on cuda:0" in said["two GPUs"]
        if pool.world_size > 1:
            assert said["ranks differ"].startswith("MismatchError")
        assert said["afterwards"] == "True"


@pytest.mark.parametrize(
    ("backend", "serves", "cpu_by"),
    [
        ("photinus", ["cpu", "cuda"], "photinus"),
        ("cuda:photinus", ["cuda"], "photinus"),
        ("cpu:photinus,cuda:photinus", ["cpu", "cuda"], "photinus"),
        ("cpu:gloo,cuda:photinus", ["cpu", "cuda"], "gloo"),
    ],
)
def test_a_group_tells_torch_of_the_devices_that_it_was_made_for(backend: str, serves: list[str], cpu_by: str) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        group: Any = dist.group.WORLD
        assert sorted(device.type for device in group._device_types) == serves
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0] * 3
        if "cpu" in serves:
            assert (group._get_backend(torch.device("cpu")) is group._gloo) == (cpu_by == "photinus")
        part = group.split_group([0])
        assert sorted(device.type for device in part._device_types) == serves
        part.shutdown()
    finally:
        dist.destroy_process_group()
