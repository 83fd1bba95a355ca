"""Backend photinus on CUDA tensors, with ranks that share the GPU. Without one: over the driver that is none.

What `make test` runs in tests/dist/test_backend_cuda.py, with the real driver, more ranks, and what only a GPU has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.dist.cuda_cases import LAYOUTS
from tests.fake_cuda import library
from tests.gpu.device import FAKE, TIMEOUT_S
from tests.rank_pool import RankPool

needs_gpu = pytest.mark.needs_gpu


def ranks(folder: Any, world_size: int, **environ: str) -> RankPool:
    if FAKE:
        library()  # once, not by each rank
        environ["FAKE_CUDA"] = "seed=2"
    environ["STORE_OF_TEST"] = str(folder / "store")
    return RankPool("tests.dist.cuda_cases:Cases", world_size=world_size, timeout_s=TIMEOUT_S, environ=environ)


@pytest.fixture(scope="module", params=[2, 3, 1])
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with ranks(tmp_path_factory.mktemp("photinus"), request.param) as made:
        yield made


@pytest.fixture
def rank_pool(pool: RankPool) -> RankPool:
    if pool.is_broken:
        pytest.fail("the ranks ended in an earlier test", pytrace=False)
    return pool


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_have_the_bits_of_the_cpu(rank_pool: RankPool, layout: str) -> None:
    assert rank_pool.ask({"do": "collectives", "layout": layout}) == [[]] * rank_pool.world_size


@pytest.mark.parametrize("case", ["lazy", "sparse", "groups"])
def test_other_forms_have_the_results_of_the_cpu(rank_pool: RankPool, case: str) -> None:
    assert rank_pool.ask({"do": case}) == [[]] * rank_pool.world_size


def test_streams_are_ordered_behind_results_without_the_host(rank_pool: RankPool) -> None:
    assert rank_pool.ask({"do": "streams"}) == [[]] * rank_pool.world_size


def test_memory_of_works_that_nobody_waits_for_is_not_reused_under_a_copy(rank_pool: RankPool) -> None:
    repeats = 100 if FAKE else 1000
    assert rank_pool.ask({"do": "dropped", "repeats": repeats}) == [[]] * rank_pool.world_size


def test_a_result_on_its_way_keeps_its_memory_when_its_work_is_gone(rank_pool: RankPool) -> None:
    assert rank_pool.ask({"do": "dropped_for_its_future"}) == [True] * rank_pool.world_size


def test_memory_comes_back_with_the_wait(rank_pool: RankPool) -> None:
    assert rank_pool.ask({"do": "memory_comes_back"}) == [True] * rank_pool.world_size


def test_works_say_when_their_results_are_there(rank_pool: RankPool) -> None:
    assert rank_pool.ask({"do": "completion"}) == [[True, True]] * rank_pool.world_size


def test_loader_workers_may_be_forked_while_a_call_is_in_flight(rank_pool: RankPool) -> None:
    assert rank_pool.ask({"do": "loader_workers"}) == [[True, True]] * rank_pool.world_size


def test_wrong_calls_are_refused_and_the_group_goes_on(rank_pool: RankPool) -> None:
    for said in rank_pool.ask({"do": "errors"}):
        assert "got one on cpu and one on cuda:0" in said["both"]
        if rank_pool.world_size > 1:
            assert said["ranks differ"].startswith("MismatchError")
        assert said["afterwards"] == "True"


@needs_gpu("a call on a stream that is being captured would be refused, and a capture beside a call left alone")
def test_a_captured_stream_is_refused_and_other_captures_go_on(rank_pool: RankPool) -> None:
    for said in rank_pool.ask({"do": "capture"}):
        assert "captur" in said["said"] or rank_pool.world_size == 1
        assert said["y"] == [[1.0] * 8, [2.0] * 8]
        assert said["x"] == [float(rank_pool.world_size) ** 2]


@needs_gpu("torch's other allocators would be used")
@pytest.mark.parametrize("allocator", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators_keep_memory_as_long(tmp_path: Any, allocator: str) -> None:
    with ranks(tmp_path, 2, PYTORCH_CUDA_ALLOC_CONF=allocator) as made:
        for case in ("streams", "dropped"):
            assert made.ask({"do": case}) == [[], []]


@needs_gpu("a tensor of 5 GiB would be reduced")
def test_a_tensor_of_5_gib_is_reduced(tmp_path: Any) -> None:
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("the GPU has less than 12 GiB free")
    with ranks(tmp_path, 2) as made:
        assert made.ask({"do": "large", "elems": (5 << 28) + 3}) == [True, True]
