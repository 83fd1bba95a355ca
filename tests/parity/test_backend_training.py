"""torch's own parallel wrappers over backend photinus train like over gloo."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks, values


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks found; one run, since the imports take most of the time."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return values(
        run_ranks(
            f"{__name__}:_all_of_it", world_size=2, backend="photinus", timeout_s=200, arguments={"folder": str(folder)}
        )
    )


def _all_of_it(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {
        "trained": _train(rank, world_size),
        "joined": _join(rank, world_size),
        "sharded": _shard(rank, world_size, folder),
        "compiled": _compiled(rank, world_size),
    }


def test_torch_ddp_trains_a_cnn_to_the_same_bits_as_over_gloo(two_ranks: list[dict[str, Any]]) -> None:
    for value in two_ranks:
        for name, runs in value["trained"].items():
            assert runs["photinus"] == runs["gloo"], name  # two ranks: addition has one order
            assert runs["photinus"][-2] < runs["photinus"][0], name


@pytest.mark.slow
def test_torch_ddp_on_three_ranks_trains_to_the_same_losses_as_over_gloo() -> None:
    for value in values(run_ranks(f"{__name__}:_train", world_size=3, backend="photinus", timeout_s=150)):
        for name, runs in value.items():
            relative = 1e-3 if "hook" in name else 1e-6  # gloo rounds each partial sum of halves, the engine the total
            for ours, gloos in zip(runs["photinus"][:-1], runs["gloo"][:-1], strict=True):
                assert abs(ours - gloos) <= relative * abs(gloos), name


def _train(rank: int, world_size: int) -> dict[str, dict[str, list[float]]]:
    """Losses of 8 steps and a sum over the weights, per kind of DDP and backend."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    groups = {"photinus": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "small buckets": {"bucket_cap_mb": 0.01},
        "static graph": {"static_graph": True},
        "bucket views": {"gradient_as_bucket_view": True},
        "unused parameters": {"find_unused_parameters": True},
    }
    hooks = {
        "fp16 hook": lambda group: (group, default_hooks.fp16_compress_hook),
        "PowerSGD hook": lambda group: (PowerSGDState(group, start_powerSGD_iter=2), powerSGD_hook),
    }

    def losses(group: Any, options: dict[str, Any], hook: Any) -> list[float]:
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128, 10),
        )
        model = DistributedDataParallel(model, process_group=group, **options)
        if hook is not None:
            model.register_comm_hook(*hook(group))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        images = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(rank))
        classes = images.mean((1, 2, 3)).mul(40).long().clamp(-5, 4) + 5
        seen = []
        for _ in range(8):
            loss = nn.functional.cross_entropy(model(images), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        seen.append(sum(p.detach().double().sum().item() for p in model.parameters()))
        return seen

    result = {}
    for name, options in kinds.items():
        result[name] = {backend: losses(group, options, None) for backend, group in groups.items()}
    for name, hook in hooks.items():
        result[name] = {backend: losses(group, {}, hook) for backend, group in groups.items()}
    return result


def test_uneven_inputs_join_and_an_error_in_a_collective_reaches_backward(two_ranks: list[dict[str, Any]]) -> None:
    joined = [value["joined"] for value in two_ranks]
    assert joined[0]["weight"] == joined[1]["weight"]
    for value in joined:
        assert "MismatchError" in value["error"]


def _join(rank: int, world_size: int) -> dict[str, Any]:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=False):
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            model(torch.full((2, 4), step + 1.0)).sum().backward()
            optimizer.step()
    weight = model.module.weight.tolist()

    broken = DistributedDataParallel(nn.Linear(4, 1))
    error = "none"

    def differing(state, bucket):  # DDP checks the annotations of a hook
        import torch.distributed as dist

        return dist.all_reduce(torch.ones(3 + rank), async_op=True).get_future().then(lambda f: f.value()[0])

    broken.register_comm_hook(None, differing)
    try:
        broken(torch.ones(2, 4)).sum().backward()
    except RuntimeError as raised:
        error = str(raised)
    return {"weight": weight, "error": error}


def test_fully_shard_and_distributed_checkpoint(two_ranks: list[dict[str, Any]]) -> None:
    for value in two_ranks:
        sharded = value["sharded"]
        assert sharded["sharded"] == sharded["reference"]
        assert sharded["loaded"] == sharded["sharded"]


def _shard(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    import torch
    import torch.distributed.checkpoint as checkpoint
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    def trained(shard: bool) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        if shard:
            fully_shard(model)
            model.set_allocate_memory_from_process_group_for_comm(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        whole = torch.randn(8, 8, generator=torch.Generator().manual_seed(5))
        part = whole.chunk(world_size)[rank] if shard else whole
        for _ in range(3):
            model(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    def rounded(model: Any) -> list[float]:
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        return [round(p.detach().sum().item(), 4) for p in whole]

    reference, model = rounded(trained(False)), trained(True)
    sharded = rounded(model)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
    state = {"model": model.state_dict()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    future = checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=f"{folder}/async")
    future.result()
    return {"sharded": sharded, "reference": reference, "loaded": rounded(model)}


def test_compiled_code_may_call_collectives(two_ranks: list[dict[str, Any]]) -> None:
    for value in two_ranks:
        assert value["compiled"] == {
            "direct": [5.0, 5.0],
            "functional": [3.0, 3.0],
            "marked": True,
            "redistributed": [0.0, 1.0],
        }


def _compiled(rank: int, world_size: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def direct(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        dist.broadcast(y, 1)
        dist.barrier()
        dist.reduce(y.clone(), 0)  # one that goes through gloo
        strided = torch.stack([y, y])[:, 0]
        dist.all_reduce(strided, op=dist.ReduceOp.AVG, async_op=True).wait()
        return y - strided / 6

    def through_functional(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x, "sum", dist.group.WORLD) * 1

    x = torch.tensor([1.0, 1.0]) + rank
    first = torch.compile(direct, backend="aot_eager")(x)
    second = torch.compile(through_functional, backend="aot_eager")(x)
    mesh = init_device_mesh("cpu", (2,))
    sharded = DTensor.from_local(torch.tensor([float(rank)]), mesh, [Shard(0)])
    return {
        "direct": first.tolist(),
        "functional": second.tolist(),
        "marked": type(dist.group.WORLD).allreduce._torchdynamo_disable,
        "redistributed": sharded.redistribute(mesh, [Replicate()]).to_local().tolist(),
    }
