"""`photinus.Average` is the average that a plain loop keeps, under each strategy, at each number of ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader

import photinus
from photinus.cli.main import main
from tests.ranks import run_ranks, values
from tests.small_run import QUIET, Net, points, right

STRATEGIES = ("ddp", "torch-ddp", "zero1", "zero2", "zero3", "fsdp2")
SETTINGS: dict[str, dict[str, Any]] = {  # of torch's AveragedModel
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.8)},
    "swa": {},
    "buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.8), "use_buffers": True},
}
OURS: dict[str, Any] = {"swa": {"first_step": 3, "every": 2}}  # beside them
STEPS, BATCH = 8, 12


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net(0.0)
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def wrap(strategy: str, net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    if strategy != "fsdp2":
        return photinus.wrap(net, optimizer, strategy=strategy)
    from torch.distributed.fsdp import fully_shard

    photinus.SyncBatchNorm.convert_sync_batchnorm(net)
    fully_shard(net[4])
    wrapped: Any = fully_shard(net)
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)


def numbers(state: Any) -> list[list[float]]:
    return [value.flatten().double().tolist() for value in state.values()]


def train(strategy: str, name: str, rank: int, *, out: Path | None = None, cut_at: int = 0, early: bool = False) -> Any:
    """Train with an average; returns what it makes of some points, and the values of its evaluation at the end."""
    net, optimizer = plain()
    average = photinus.Average(net, **SETTINGS[name], **OURS.get(name, {})) if early else None
    model, optimizer = wrap(strategy, net, optimizer)
    average = average or photinus.Average(model, **SETTINGS[name], **OURS.get(name, {}))
    accumulate = 2 if name == "ema" else 1
    loop = photinus.Loop(
        model, optimizer, points(), batch_size=BATCH // accumulate, accumulate=accumulate, steps=STEPS, out=out,
        state={"average": average}, report=QUIET, save=photinus.Saving(every_steps=3),
    )  # fmt: skip
    measured = 0.0
    for inputs, targets in loop:
        loop.backward(cross_entropy(model(inputs), targets))
        if loop.step_due:
            optimizer.step()
            optimizer.zero_grad()
        if loop.validation_due:
            measured = photinus.evaluate(average, points(31), right, batch_size=8)
        if loop.step == cut_at:
            break
    outputs = photinus.predict(average, points(16), on_all_ranks=True)
    return [int(average.n_averaged), measured, outputs.flatten().tolist()]


def naive(name: str, sums: list[list[tuple[Tensor, Tensor]]]) -> AveragedModel:
    """A plain loop of torch over the same batches."""
    net, optimizer = plain()
    average = AveragedModel(net, **SETTINGS[name])
    for step, parts in enumerate(sums, start=1):
        for inputs, targets in parts:
            (cross_entropy(net(inputs), targets) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
        own = OURS.get(name, {"first_step": 1, "every": 1})
        if step >= own["first_step"] and (step - own["first_step"]) % own["every"] == 0:
            average.update_parameters(net)
    return average.eval()


def batches(accumulate: int) -> list[list[tuple[Tensor, Tensor]]]:
    """The batches of a run in one process, by step."""
    net, optimizer = plain()
    loop = photinus.Loop(
        *photinus.wrap(net, optimizer), points(), batch_size=BATCH // accumulate, accumulate=accumulate, steps=STEPS,
        report=QUIET,
    )  # fmt: skip
    found: list[list[tuple[Tensor, Tensor]]] = []
    for batch in loop:
        found += [[]] * (loop.micro_batch == 1)
        found[-1] = [*found[-1], tuple(batch)]
        loop.backward(net(batch[0]).sum())
        if loop.step_due:
            optimizer.zero_grad()
    return found


def on_ranks(rank: int, world_size: int, out: str, strategies: list[str], names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in strategies:
        for name in names:
            with photinus.init("auto", "cpu", seed=1):
                found[f"{strategy}, {name}"] = train(strategy, name, rank)
        if strategy == "fsdp2":
            continue
        place = Path(out, strategy)
        for cut_at in (5, 0):
            with photinus.init("auto", "cpu", seed=1):
                found[f"{strategy}, resumed"] = train(strategy, "ema", rank, out=place, cut_at=cut_at)
        with photinus.init("auto", "cpu", seed=1):
            found[f"{strategy}, made before wrap"] = train(strategy, "ema", rank, early=True)
    return found


@pytest.mark.timeout(90)
def test_an_average_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    check(2, tmp_path, ["ddp", "zero3"], ["ema"])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_average_is_that_of_a_plain_loop(world_size: int, tmp_path: Path) -> None:
    check(world_size, tmp_path, [*STRATEGIES], [*SETTINGS])


def check(world_size: int, folder: Path, strategies: list[str], names: list[str]) -> None:
    arguments = {"out": str(folder), "strategies": strategies, "names": names}
    function = "tests.dist.test_averages:on_ranks"
    timeout_s = 80.0 if len(names) == 1 else 220.0
    first, *others = values(
        run_ranks(function, world_size=world_size, backend="photinus", timeout_s=timeout_s, arguments=arguments)
    )
    assert all(rank == first for rank in others)  # to the last bit
    with photinus.init("gloo", "cpu", seed=1):
        for name in names:
            average = naive(name, batches(2 if name == "ema" else 1))
            outputs = average(points(16).tensors[0]).flatten().tolist()
            accuracy = right(average(points(31).tensors[0]), points(31).tensors[1]).double().mean().item()
            for strategy in strategies:
                updates, measured, found = first[f"{strategy}, {name}"]
                assert updates == int(average.n_averaged)
                assert found == pytest.approx(outputs, rel=1e-3, abs=1e-4), (strategy, name)
                assert measured == pytest.approx(accuracy, abs=1 / 31)
    for strategy in strategies:
        if strategy != "fsdp2":
            straight = first[f"{strategy}, ema"]
            assert first[f"{strategy}, resumed"] == straight, strategy
            assert first[f"{strategy}, made before wrap"] == straight, strategy
            loads_everywhere(folder / strategy, straight[2])


def loads_everywhere(folder: Path, outputs: list[float]) -> None:
    """The entry of a checkpoint loads into torch's class, and into a plain model; the export is the same."""
    net, of_torch = Net(0.0), AveragedModel(Net(0.0))
    with photinus.init("gloo", "cpu"):
        photinus.load(folder, average=net)
        photinus.load(folder, average=of_torch)
    again = AveragedModel(Net(0.0))
    again.load_state_dict(torch.load(next((folder / "checkpoints").glob("step-*8")) / "average.pt"))
    exported, file = Net(0.0), folder / "average.safetensors"
    assert main(["export", str(folder), "-o", str(file), "--average", "average"]) == 0
    from safetensors.torch import load_file

    exported.load_state_dict(load_file(file))
    for model in (net, of_torch, again, exported):
        found = model.eval()(points(16).tensors[0]).flatten().tolist()
        assert found == pytest.approx(outputs, rel=1e-5, abs=1e-6)
    assert int(of_torch.n_averaged) == int(again.n_averaged) == STEPS


def two_optimizers_on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    """Return the outputs of an average that equals the model (decay 0), and those of the model."""
    found: dict[str, Any] = {}
    for strategy in STRATEGIES[:-1]:
        with photinus.init("auto", "cpu", seed=1):
            net, _ = plain()
            parts = [*net.parameters()]
            pair = torch.optim.SGD(parts[:2], lr=0.1), torch.optim.AdamW(parts[2:], lr=0.1)
            model, first, second = photinus.wrap(net, *pair, strategy=strategy)
            average = photinus.Average(model, get_ema_multi_avg_fn(0.0))
            state = {"average": average, "second": second}
            loop = photinus.Loop(model, first, points(), batch_size=BATCH, steps=3, state=state, report=QUIET)
            for inputs, targets in loop:
                loop.backward(cross_entropy(model(inputs), targets))
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
            outputs = [photinus.predict(m, points(8), on_all_ranks=True).flatten().tolist() for m in (average, model)]
            found[strategy] = [int(average.n_averaged), *outputs]
    return found


@pytest.mark.timeout(90)
def test_an_average_of_a_model_with_two_optimizers_has_the_last_steps_of_both() -> None:
    found = values(run_ranks("tests.dist.test_averages:two_optimizers_on_ranks", world_size=2, backend="photinus"))
    for rank in found:
        for strategy, (updates, averaged, trained) in rank.items():
            assert (updates, averaged) == (3, trained), strategy


def bn_on_ranks(rank: int, world_size: int) -> list[Any]:
    found = []
    with photinus.init("auto", "cpu", seed=1):
        for strategy in ("ddp", "zero3"):
            net, optimizer = plain()
            model, optimizer = photinus.wrap(net, optimizer, strategy=strategy)
            average = photinus.Average(model)
            average.update_parameters(model)
            photinus.update_bn(average, points(50), batch_size=8)
            bn: Any = average.module[1]  # type: ignore[index]
            tensors = [bn.running_mean.tolist(), bn.running_var.tolist(), int(bn.num_batches_tracked)]
            found.append([*tensors, bn.momentum, model.training, sorted(vars(bn)) == sorted(vars(copy.copy(bn)))])
    return found


@pytest.mark.timeout(120)
def test_statistics_of_batch_norms_are_torchs_with_the_same_bits_at_each_number_of_ranks() -> None:
    function = "tests.dist.test_averages:bn_on_ranks"
    runs = [values(run_ranks(function, world_size=n, backend="photinus", timeout_s=100)) for n in (1, 2, 3)]
    first = runs[0][0]
    assert all(rank == first for run in runs for rank in run)
    net, _ = plain()
    average = AveragedModel(net)
    update_bn(DataLoader(points(50), batch_size=8), average)
    norm: Any = average.module[1]  # type: ignore[index]
    for mean, variance, count, momentum, *_ in first:
        torch.testing.assert_close(torch.tensor(mean), norm.running_mean)
        torch.testing.assert_close(torch.tensor(variance), norm.running_var)
        assert (count, momentum) == (int(norm.num_batches_tracked), norm.momentum) == (7, 0.1)
