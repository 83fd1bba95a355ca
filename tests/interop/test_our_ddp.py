"""photinus.DistributedDataParallel where Accelerate and Lightning ask for torch's class, against one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import photinus
from tests.ranks import run_ranks, values

pytestmark = pytest.mark.slow

STEPS, PART = 6, 4


def _run(name: str, package: str, tmp_path: Path) -> list[Any]:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install -c constraints.txt '.[interop]'")
    arguments = {"folder": str(tmp_path)}
    environ = {"HF_HUB_OFFLINE": "1"}
    return values(
        run_ranks(
            f"{__name__}:{name}",
            world_size=2,
            backend="photinus",
            timeout_s=150,
            arguments=arguments,
            environ=environ,
        )
    )


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batches(world_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The global batches, the same on all ranks."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        size = PART * world_size
        yield (
            torch.randn(size, 6, generator=generator, dtype=torch.float64),
            torch.randn(size, 2, generator=generator, dtype=torch.float64),
        )


def trained_alone(world_size: int, accumulate: int) -> nn.Sequential:
    """What one process makes of the global batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches(world_size), 1):
        (nn.functional.mse_loss(model(x), y) / accumulate).backward()
        if step % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def farthest(model: nn.Module, other: nn.Module) -> float:
    return max(float((p - q).abs().max()) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def part(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor[rank * PART : (rank + 1) * PART]


def test_accelerate_takes_a_model_that_is_wrapped_already(tmp_path: Path) -> None:
    for value in _run("_accelerate", "accelerate", tmp_path):
        assert value["wrapped_in"] == "photinus"
        assert value["synced"] == [False, True] * (STEPS // 2)
        assert value["equal_gradients"] == value["synced"]
        assert value["farthest"] < 1e-12
        assert value["triggered"] == [False, True]
        assert value["unwrapped_is_the_model"]
        assert value["state_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert value["farthest_after_load"] == 0.0


def _accelerate(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    import torch.distributed as dist
    from accelerate import Accelerator

    def equal_gradients() -> bool:
        mine = torch.cat([p.grad.flatten() for p in model.parameters()])
        everyone = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(everyone, mine)
        return all(torch.equal(mine, other) for other in everyone)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == world_size
    inner = network()
    # evaluation_mode: takes the model into save_state and load_state, and does not wrap it once more
    model = accelerator.prepare_model(photinus.DistributedDataParallel(inner), evaluation_mode=True)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    synced, equal = [], []
    for x, y in batches(world_size):
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(part(x, rank)), part(y, rank)))
            synced.append(accelerator.sync_gradients)
            equal.append(equal_gradients())
            optimizer.step()
            optimizer.zero_grad()
    off = farthest(inner, trained_alone(world_size, accumulate=2))

    accelerator.save_state(folder)
    before = [p.detach().clone() for p in inner.parameters()]
    nn.init.zeros_(inner[0].weight)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)

    triggered = []
    torch.optim.SGD(model.parameters()).zero_grad()
    x, y = next(batches(world_size))
    with accelerator.no_sync(model):
        first = nn.functional.mse_loss(model(part(x, rank)), part(y, rank))
        second = nn.functional.mse_loss(model(part(y, rank) @ torch.ones(2, 6).double()), part(y, rank))
        accelerator.backward(first)
        triggered.append(equal_gradients())
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
        triggered.append(equal_gradients())
    return {
        "wrapped_in": type(model).__module__.split(".")[0],
        "synced": synced,
        "equal_gradients": equal,
        "farthest": off,
        "triggered": triggered,
        "unwrapped_is_the_model": accelerator.unwrap_model(model) is inner,
        "state_names": list(accelerator.get_state_dict(accelerator.unwrap_model(model))),
        "farthest_after_load": max(float((p - q).abs().max()) for p, q in zip(inner.parameters(), before, strict=True)),
    }


def test_accelerate_joins_uneven_inputs_of_a_model_that_is_wrapped_already(tmp_path: Path) -> None:
    """Accelerate does so on GPUs only, by torch's Join on what it was given; here it is told that it has some."""
    results = _run("_accelerate_join", "accelerate", tmp_path)
    assert [value["steps"] for value in results] == [2, 4]
    assert results[0]["weights"] == results[1]["weights"]


def _accelerate_join(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    model = accelerator.prepare_model(photinus.DistributedDataParallel(network()), evaluation_mode=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Accelerator.multi_device = property(lambda _: True)
    steps = 0
    with accelerator.join_uneven_inputs([model]):
        for step, (x, y) in enumerate(batches(world_size)):
            if step == 2 + 2 * rank:
                break
            nn.functional.mse_loss(model(part(x, rank)), part(y, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return {"steps": steps, "weights": [p.tolist() for p in model.parameters()]}


def test_fabric_runs_our_class_by_a_strategy_of_three_lines(tmp_path: Path) -> None:
    for value in _run("_fabric", "lightning", tmp_path):
        assert value["wrapped_in"] == "photinus"
        assert value["farthest"] < 1e-12
        assert value["state_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert value["farthest_after_load"] == 0.0


def _fabric(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    class PhotinusStrategy(DDPStrategy):
        def setup_module(self, module: nn.Module) -> Any:
            return photinus.DistributedDataParallel(module, **self._ddp_kwargs)

    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=PhotinusStrategy())
    fabric.launch()
    assert fabric.world_size == world_size
    inner = network()
    model, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    for step, (x, y) in enumerate(batches(world_size), 1):
        with fabric.no_backward_sync(model, enabled=step % 2 == 1):
            fabric.backward(nn.functional.mse_loss(model(part(x, rank)), part(y, rank)) / 2)
        if step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    off = farthest(inner, trained_alone(world_size, accumulate=2))
    path = Path(folder, "state.ckpt")
    fabric.save(path, {"model": model, "optimizer": optimizer})
    before = [p.detach().clone() for p in inner.parameters()]
    nn.init.zeros_(inner[0].weight)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    return {
        "wrapped_in": type(model._forward_module).__module__.split(".")[0],
        "farthest": off,
        "state_names": list(model.state_dict()),
        "farthest_after_load": max(float((p - q).abs().max()) for p, q in zip(inner.parameters(), before, strict=True)),
    }


def test_lightnings_trainer_runs_our_class_by_a_strategy_of_three_lines(tmp_path: Path) -> None:
    for value in _run("_lightning", "lightning", tmp_path):
        assert value["wrapped_in"] == "photinus"
        assert value["farthest"] < 1e-12


def _lightning(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader

    wrapped_in = []

    class PhotinusStrategy(DDPStrategy):
        def _setup_model(self, model: nn.Module) -> Any:
            return photinus.DistributedDataParallel(model, **self._ddp_kwargs)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any) -> torch.Tensor:
            x, y = batch
            wrapped_in.append(type(self.trainer.strategy.model).__module__.split(".")[0])
            loss = nn.functional.mse_loss(self.network(x), y)
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=PhotinusStrategy(),
        max_epochs=1,
        accumulate_grad_batches=2,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    assert trainer.world_size == world_size
    module = Module()
    mine = [(part(x, rank), part(y, rank)) for x, y in batches(world_size)]
    trainer.fit(module, DataLoader(mine, batch_size=None))
    return {
        "wrapped_in": wrapped_in[0],
        "farthest": farthest(module.network, trained_alone(world_size, accumulate=2)),
    }
