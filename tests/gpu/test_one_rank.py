"""One rank: which device is chosen, our DDP over NCCL, and what a wait for it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import photinus
from photinus.errors import DeviceError
from photinus.job.world import World
from photinus.parallel.ddp.sync_batch_norm import _local_statistics
from photinus.parallel.exchange.verify_models import gpu_identity
from photinus.trainer.session.placement import choose_device
from tests.gpu.device import DEVICE, HAS_GPU, NAME, TIMEOUT_S
from tests.rank_pool import RankPool

needs_gpu = pytest.mark.needs_gpu


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    environ = {
        "STORE_OF_TEST": str(tmp_path_factory.mktemp("one") / "store"),
        "BACKEND_OF_TEST": "nccl" if HAS_GPU else "gloo",
        "DEVICE_OF_TEST": NAME,
        "NVIDIA_TF32_OVERRIDE": "0",
    }
    with RankPool("tests.gpu.rank_cases:Cases", world_size=1, timeout_s=TIMEOUT_S, environ=environ) as ranks:
        yield ranks


def test_a_channel_that_is_constant_has_no_variance() -> None:
    """Ranks whose pixels are all black in a channel must not make its running variance infinite on all."""
    x = torch.randn(4, 3, 5, 5, device=DEVICE)
    x[:, 1] = 2.0
    count, mean, squares = _local_statistics(x)
    assert float(count) == 100
    assert float(mean[1]) == 2
    assert float(squares[1]) == 0
    assert torch.allclose(squares, x.transpose(0, 1).flatten(1).var(dim=1, correction=0) * 100, rtol=1e-4)


@needs_gpu("device='auto' and 'cuda' would be chosen for a world of one")
def test_auto_and_cuda_are_the_gpu() -> None:
    for wanted in ("auto", "cuda", "cuda:0"):
        device, reason = choose_device(wanted, World())
        assert device == torch.device("cuda", 0), reason
    with photinus.init(device="cuda") as world:
        assert world.backend == "nccl"
    assert choose_device("cpu", World())[0].type == "cpu"


@needs_gpu("a local rank beyond the number of GPUs, and cuda:99, would be refused")
def test_more_ranks_than_gpus_and_absent_numbers_are_refused() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(DeviceError, match=f"local rank {count} of {count + 1} ranks .* only {count} CUDA"):
        choose_device("auto", World(count, count + 1, count, count + 1))
    with pytest.raises(DeviceError, match="'cuda:99' does not exist"):
        choose_device("cuda:99", World())


@needs_gpu("a GPU's identity would be read: it has a uuid, whatever its number")
def test_a_gpu_is_known_by_its_uuid(record_property: Any) -> None:
    identity = gpu_identity(torch.device("cuda", 0))
    record_property("identity", identity)
    assert "all:0" not in identity


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"dtype": "bfloat16"}, {"channels_last": True}], ids=str)
def test_ddp_exchanges_with_itself_and_changes_nothing(pool: RankPool, options: dict[str, Any]) -> None:
    """One rank, made to exchange: copies into buckets, launches, waits and the averages of NCCL are all real."""
    (ours,) = pool.ask({"do": "ddp", "wrapper": "photinus", **options})
    (plain,) = pool.ask({"do": "ddp", "wrapper": "", **options})
    assert ours["rounds"] == 6
    assert ours["memory_kept"], "buckets took fresh memory in each step: somebody still holds the old"
    tolerance = 1e-2 if "dtype" in options else 1e-5
    assert ours["losses"] == pytest.approx(plain["losses"], rel=tolerance)
    assert ours["weights"] == pytest.approx(plain["weights"], rel=tolerance, abs=tolerance)


def test_gradients_read_right_after_backward_are_averages(pool: RankPool) -> None:
    assert max(pool.ask({"do": "gradients_at_once"})) == 0


def test_a_model_on_two_streams_gets_right_gradients(pool: RankPool) -> None:
    assert max(pool.ask({"do": "two_streams"})) < 1e-6


@needs_gpu("matrix products would be queued, and backward would come back to Python before they are done")
def test_waiting_for_averages_lets_the_stream_wait_and_not_python(record_property: Any) -> None:
    """In this process, over NCCL: backward returns while the device still computes."""
    import torch.distributed as dist

    from tests.gpu.rank_cases import wrapped

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = wrapped(torch.nn.Linear(8192, 8192, bias=False).to(DEVICE), "photinus")
        x = torch.randn(8192, 8192, device=DEVICE)
        for _ in range(3):
            ddp(x).sum().backward()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            ddp(x).sum().backward()
        queued_s = time.perf_counter() - began
        torch.cuda.synchronize()
        done_s = time.perf_counter() - began
        record_property("queued after, s", round(queued_s, 4))
        record_property("done after, s", round(done_s, 4))
        assert queued_s < done_s / 2
    finally:
        dist.destroy_process_group()


@needs_gpu("a group cpu:photinus,cuda:nccl would average a CPU and a CUDA tensor")
def test_a_group_of_both_devices_serves_both() -> None:
    import torch.distributed as dist

    dist.init_process_group("cpu:photinus,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for device in ("cpu", "cuda:0"):
            tensor = torch.full((1000,), 3.0, device=device)
            dist.all_reduce(tensor)
            assert tensor.cpu().eq(3).all()
    finally:
        dist.destroy_process_group()
