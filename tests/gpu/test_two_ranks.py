"""Two ranks on one GPU, over gloo and over photinus: all that two ranks do with gradients, beside torch's own and one
process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.gpu.device import NAME, TIMEOUT_S
from tests.gpu.rank_cases import Cases
from tests.rank_pool import RankPool

WRAPPERS = ("photinus", "torch")
Alone = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", params=["gloo", "photinus"], ids="over_{}".format)
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    environ = {
        "STORE_OF_TEST": str(tmp_path_factory.mktemp("two") / "store"),
        "BACKEND_OF_TEST": request.param,
        "DEVICE_OF_TEST": NAME,
        "PHOTINUS_RANKS_PER_GPU": "2",
        "NVIDIA_TF32_OVERRIDE": "0",
    }
    with RankPool("tests.gpu.rank_cases:Cases", world_size=2, timeout_s=TIMEOUT_S, environ=environ) as ranks:
        yield ranks


@pytest.fixture
def two(pool: RankPool) -> RankPool:
    if pool.is_broken:
        pytest.fail("the ranks ended in an earlier test", pytrace=False)
    return pool


@pytest.fixture(scope="module")
def alone() -> Alone:
    cases = Cases.__new__(Cases)
    cases.rank, cases.world_size = 0, 1
    return lambda **options: cases.ddp("", **options)


def close(a: list[float], b: list[float], tolerance: float = 1e-4) -> None:
    assert a == pytest.approx(b, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2}, {"clip": 0.05}, {"channels_last": True}],
    ids=["plain", "no_sync", "clip", "channels_last"],
)
def test_ddp_trains_as_one_process_on_whole_batches(
    two: RankPool, alone: Alone, wrapper: str, options: dict[str, Any]
) -> None:
    ours = two.ask({"do": "ddp", "wrapper": wrapper, **options})
    assert ours[0]["weights"] == ours[1]["weights"], "the ranks' weights differ"
    one = alone(**options)
    close(ours[0]["losses"], one["losses"])
    close(ours[0]["weights"], one["weights"])


@pytest.mark.parametrize("norm", WRAPPERS)
def test_synchronised_batch_norm_has_the_statistics_of_the_global_batch(two: RankPool, alone: Alone, norm: str) -> None:
    if norm == "torch" and NAME == "cpu":
        pytest.skip("without a GPU: torch.nn.SyncBatchNorm would be compared; it knows no CPU")
    for layout in (False, True):
        ours = two.ask({"do": "ddp", "wrapper": "photinus", "norm": norm, "channels_last": layout})
        close(ours[0]["losses"], alone(norm=norm, channels_last=layout)["losses"])


def test_buckets_keep_their_memory_from_step_to_step(two: RankPool) -> None:
    assert all(told["memory_kept"] for told in two.ask({"do": "ddp", "wrapper": "photinus"}))


def test_gradients_read_right_after_backward_are_averages(two: RankPool) -> None:
    assert max(two.ask({"do": "gradients_at_once"})) == 0


def test_a_model_on_two_streams_gets_right_averages(two: RankPool) -> None:
    assert max(two.ask({"do": "two_streams"})) < 1e-6


def test_unused_parameters_are_treated_as_by_torch(two: RankPool) -> None:
    ours, theirs = (two.ask({"do": "unused", "wrapper": wrapper}) for wrapper in WRAPPERS)
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            close(a, b)


def test_ranks_without_input_join_as_with_torch(two: RankPool) -> None:
    ours, theirs = (two.ask({"do": "join", "wrapper": wrapper}) for wrapper in WRAPPERS)
    assert ours[0] == ours[1]
    close(ours[0], theirs[0])


@pytest.mark.parametrize("strategy", ["torch-ddp", "zero1", "zero2", "zero3"])
def test_strategies_train_what_ddp_trains(two: RankPool, strategy: str) -> None:
    for options in ({"optimizer": "sgd"}, {"optimizer": "sgd", "parts": 2}, {"optimizer": "sgd", "clip": 0.2}):
        ddp, other = (two.ask({"do": "train", "strategy": s, **options})[0] for s in ("ddp", strategy))
        for name, values in ddp["model"].items():
            close(other["model"][name], values)


def test_fsdp2_trains_as_one_process_on_whole_batches(two: RankPool) -> None:
    close(two.ask({"do": "fsdp"})[0], two.ask({"do": "fsdp", "sharded": False})[0])


def test_a_gradient_that_overflows_leaves_the_step_out_on_all_ranks(two: RankPool) -> None:
    for told in two.ask({"do": "overflow", "strategy": "ddp", "optimizer": "sgd"}):
        assert told["same"]
        assert told["finite"]
        assert told["steps"][1]["scale"] < told["steps"][0]["scale"]
