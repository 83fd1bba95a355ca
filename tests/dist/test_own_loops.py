"""One rank does something else than the others in a loop of the user's own: no strategy trains on in silence.

As in test_misbehaviour.py, where the ranks run a Loop: each case has to end with an error on every rank, or with the
weights of the same training without misbehaviour. And what all ranks do alike is no misbehaviour.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.dist.ways import STRATEGIES, outcomes
from tests.ranks import run_ranks, values

STEPS, WRONG = 12, 5

GRADIENTS = [
    "clip left out",
    "other max_norm",
    "other norm_type",
    "values clipped",
    "other clip_value",
    "gradient multiplied",
    "gradient multiplied by data",
    "gradient replaced",
    "gradient absent",
    "zero_grad left out",
    "zero_grad before the step",
]
OPTIONS = [
    "other lr",
    "other lr of numpy",
    "other lr for ever",
    "other betas",
    "other weight_decay",
    "scheduler left out",
]
STATES = [
    "weight changed",
    "element changed",
    "weights changed by data",
    "weights loaded",
    "weights changed at the end",
    "frozen weight changed",
    "moments changed",
    "moments changed at the end",
    "moments changed for ever",
    "states loaded",
    "states cleared",
]
CALLS = [
    "step left out",
    "step left out at the end",
    "another step",
    "backward left out",
    "another backward",
    "no_sync",
    "no_sync at the end",
    "forward left out",
    "another forward",
    "body left out",
    "parameter frozen",
]
EVERYONE = ["all leave out the last backward", "all run in no_sync", "all run in no_sync in the last step"]
"""Ways of all ranks: no difference between them would show it."""

RIGHT = [
    "all add noise",
    "all make gradients",
    "all clip values",
    "all change moments",
    "all reset moments of a layer",
    "all load states",
    "all step in inference mode",
    "all change weights",
    "all scale",
    "all average by hand",
    "all accumulate",
    "rank 0 looks at the norm",
    "unchecked",
]
NO_PARTS = ("all average by hand", "all step in inference mode", "rank 0 looks at the norm")
"""These are for strategies that hold whole gradients: torch's DTensors refuse inference mode."""

LEFT: dict[tuple[str, str], str] = {}
"""Cases that train on in silence, and why; docs/troubleshooting.md has them."""


def test_what_one_rank_does_to_a_step_is_an_error_on_all(tmp_path: Path) -> None:
    said = {
        "other lr": r"AdamW.step\(\) 6, group 1, lr=0.01 on rank 0, 0.05 on rank 1",
        "other lr of numpy": r"AdamW.step\(\) 6, group 1, lr=0.01 on rank 0, 0.05\d* on rank 1",
        "other max_norm": r"before \w*AdamW.step\(\) 6, .*max_norm=0.1 on rank 0, 0.02 on rank 1",
        "values clipped": r"before \w*AdamW.step\(\) 6, .*clip_value=absent on rank 0, 0.001 on rank 1",
        "gradient multiplied": r"gradient of 0.weight=as averaged on rank 0, changed 1 times .* on rank 1",
        "gradient absent": r"gradient of 0.weight=as averaged on rank 0, absent on rank 1",
        "weight changed": r"parameters changed before it=\[\] on rank 0, \['0.weight'\] on rank 1",
        "frozen weight changed": r"changed after step 12=\[\] on rank 0, \['2.weight'\] on rank 1|parameter 2.weight",
        "moments changed at the end": r"changed after step 12=\[\] on rank 0, \['exp_avg.*'\] on rank 1",
        "moments changed": r"state changed before it=\[\] on rank 0, .*exp_avg.* on rank 1",
        "hook from before wrap": r"gradient of 0.weight=as averaged on rank 0, changed 1 times .* on rank 1",
        "zero_grad left out": r"some ranks stepped with gradients of the step before",
        "step left out at the end": r"optimizer steps=12 on rank 0, 11 on rank 1|rank 0 called broadcast"
        r"|before saving .*model.pt the ranks hold different weights: rank 0 and rank 1 have .* in parameter 0.weight",
        "all run in no_sync": r"no exchange has averaged over the ranks \(of 0.weight, 0.bias",
    }
    right = ["all add noise", "all make gradients", "all change moments", "all accumulate", "unchecked"]
    right += ["all reset moments of a layer", "all step in inference mode"]
    elsewhere = ("hook from before wrap", "zero_grad left out")  # "zero1" calls such a hook before the exchange
    ways = [way for way in said if way not in elsewhere]
    found = outcomes(__name__, tmp_path, [*ways, *right], ("zero1", "zero2"))
    found |= outcomes(__name__, tmp_path / "hooks", ["hook from before wrap"], ("zero2", "zero3"))
    found |= outcomes(__name__, tmp_path / "replicas", ["step left out at the end"], ("ddp", "torch-ddp"))
    found |= outcomes(__name__, tmp_path / "left over", ["zero_grad left out"], ("ddp",))
    for (way, strategy), ranks in found.items():
        if way in RIGHT:
            assert is_right(way, strategy, ranks), (way, strategy, ranks)
        else:
            assert all(re.search(f"error: .*{said[way]}", text) for text in ranks), (way, strategy, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_misbehaviour_in_a_loop_of_ones_own_trains_on_in_silence(
    strategy: str, world_size: int, tmp_path: Path
) -> None:
    ways = [*GRADIENTS, *OPTIONS, *STATES, *CALLS, *EVERYONE, *RIGHT]
    found = outcomes(__name__, tmp_path, ways, (strategy,), world_size)
    wrong = {c: ranks for c, ranks in found.items() if c not in LEFT and not is_right(*c, ranks)}
    assert not wrong, "\n".join(f"{case}: {ranks}" for case, ranks in wrong.items())


def test_ranks_that_keep_other_objects_make_the_same_steps(tmp_path: Path) -> None:
    found = values(
        run_ranks(f"{__name__}:keep_objects", world_size=2, timeout_s=120, arguments={"folder": str(tmp_path)})
    )
    assert found == [True, True]


def keep_objects(rank: int, world_size: int, folder: str) -> bool:
    """Where one object goes, and a new one may take its place in memory, differs among the ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import photinus

    torch.set_num_threads(1)
    store = dist.FileStore(folder + "/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    kept: list[object] = []
    with photinus.init(device="cpu", seed=1):
        models = []
        for number in range(6):
            kept.append([object() for _ in range(1000 * rank * number)])
            models.append(photinus.wrap(nn.Linear(4, 2), strategy="zero3"))
        for steps, model in enumerate(models):
            for _ in range(4):
                optimizer = torch.optim.Adam(model.parameters())
                for _ in range(1 + steps):
                    model(torch.ones(2, 4)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if rank == 0:
                    kept.append(optimizer)
                del optimizer
        photinus.save(Path(folder, "all.pt"), model=nn.ModuleList(models))
    dist.destroy_process_group()
    return True


def test_zero1_steps_parameters_that_are_lazily_conjugated_or_negated() -> None:
    for alone, together in values(run_ranks(f"{__name__}:step_lazy", world_size=2, backend="photinus", timeout_s=120)):
        assert together == alone


def step_lazy(rank: int, world_size: int) -> list[list[str]]:
    import torch
    from torch import nn

    import photinus

    class Lazy(nn.Module):
        def __init__(self, value: torch.Tensor) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(value[:2]), nn.Parameter(value[2:])

        def forward(self) -> torch.Tensor:
            return (self.first * self.second).abs().sum()

    found: list[list[str]] = [[], []]
    with photinus.init(device="cpu", seed=1):
        for is_negative in (False, True):
            for place, strategy in enumerate((None, "zero1")):
                value = torch.tensor([1 + 2j, 3 - 1j, 2j, 1]).conj()
                net = Lazy(value.imag if is_negative else value)
                optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
                model: Any = net
                if strategy:
                    model, optimizer = photinus.wrap(net, optimizer, strategy=strategy)
                for _ in range(10):
                    model().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found[place].append(str([net.first.tolist(), net.second.tolist()]))
    return found


def is_right(way: str, strategy: str, ranks: list[str]) -> bool:
    if way in NO_PARTS and strategy in ("zero2", "zero3"):
        return True
    if way in RIGHT:
        return not any(text.startswith("error") for text in ranks)
    return all(text.startswith("error: ") for text in ranks) or set(ranks) == {"right"}


def train(way: str, strategy: str, rank: int, out: Path) -> list[float]:
    """Rank 0's weights in the end, where rank 1 misbehaves in step WRONG, or all ranks in each."""
    import contextlib
    import copy

    import numpy
    import torch
    from torch import nn

    import photinus

    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    net[2].requires_grad_(False)
    if way == "hook from before wrap" and rank == 1:
        net[0].weight.register_post_accumulate_grad_hook(lambda each: each.grad.mul_(3))
    first, last = [{"params": list(net[place].parameters())} for place in (0, 3)]
    unchecked = {"check_ranks": False} if way == "unchecked" else {}
    optimizer: Any = torch.optim.AdamW([first, last], lr=0.01)
    model, optimizer = photinus.wrap(net, optimizer, strategy=strategy, **unchecked)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=way == "all scale")
    weight, trained = photinus.unwrap(model)[0].weight, [p for p in model.parameters() if p.requires_grad]
    verbs = photinus.parallel.strategy_of(model)
    for step in range(STEPS):
        wrong = WRONG if "at the end" not in way else STEPS - 1
        doing = way if rank == 1 and step == wrong else ""
        if rank == 1 and step >= wrong and "for ever" in way:
            doing = way.removesuffix(" for ever")
        if way.startswith("all "):
            doing = way.removesuffix(" in the last step") if "last step" not in way or step == STEPS - 1 else ""
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + rank))
        if doing == "body left out":
            continue
        if doing == "another forward":
            model(x)
        if doing == "parameter frozen":
            weight.requires_grad_(False)
        group, options = optimizer.param_groups[1], dict(optimizer.param_groups[1])
        waits = doing in (*EVERYONE, "all run in no_sync", "all average by hand", "all accumulate")
        with verbs.no_sync(model) if waits or doing.startswith("no_sync") else contextlib.nullcontext():
            if doing != "forward left out":
                loss = model(x).square().mean()
                if doing != "backward left out":
                    scaler.scale(loss).backward()
        if doing in ("another backward", "all accumulate"):
            model(x).square().mean().backward()
        if doing == "all average by hand":
            for each in trained:
                if strategy in ("ddp", "zero1"):
                    torch.distributed.all_reduce(each.grad)
        scaler.unscale_(optimizer) if scaler.is_enabled() else None
        if way == "other clip_value":
            nn.utils.clip_grad_value_(trained, 0.001 if doing else 0.01)
        change_gradients(doing, weight, trained, optimizer)
        if way == "rank 0 looks at the norm" and rank == 0 and strategy in ("ddp", "zero1"):
            nn.utils.clip_grad_norm_(trained, float("inf"))
        if doing == "other lr" or (way == "unchecked" and rank == 1):
            group["lr"] = 0.05
        if way == "other lr of numpy":
            group["lr"] = numpy.float32(0.05) if doing else numpy.float64(group["lr"])
        if doing == "other betas":
            group["betas"] = (0.5, 0.9)
        if doing == "other weight_decay":
            group["weight_decay"] = 0.5
        if not doing.startswith("step left out"):
            with torch.inference_mode(doing == "all step in inference mode"):
                scaler.step(optimizer)
            scaler.update()
        if doing == "another step":
            optimizer.step()
        group.update({name: value for name, value in options.items() if name not in ("lr", "params")})
        if doing in ("other lr", "other lr of numpy") or way == "unchecked":
            group["lr"] = options["lr"]
        if doing != "zero_grad left out":
            optimizer.zero_grad()
        if doing != "scheduler left out":
            scheduler.step()
        change_weights(doing, model, weight, optimizer, copy)
    photinus.save(out / "model.pt", model=model, optimizer=optimizer)
    saved = photinus.load(out / "model.pt")["model"]
    return [number for value in saved.values() for number in value.flatten().tolist()]


def change_gradients(doing: str, weight: Any, trained: list[Any], optimizer: Any) -> None:
    import torch
    from torch import nn

    if doing == "gradient multiplied":
        weight.grad.mul_(3)
    if doing != "clip left out" and not doing.startswith("all run"):
        kind = 1.0 if doing == "other norm_type" else 2.0
        nn.utils.clip_grad_norm_(trained, 0.02 if doing == "other max_norm" else 0.1, kind)
    if doing in ("values clipped", "all clip values"):
        nn.utils.clip_grad_value_(trained, 0.001)
    if doing == "gradient multiplied by data":
        weight.grad.data.mul_(3)
    if doing == "gradient replaced":
        weight.grad = weight.grad * 3
    if doing == "gradient absent":
        weight.grad = None
    if doing == "zero_grad before the step":
        optimizer.zero_grad()
    if doing == "all add noise":
        for each in trained:
            each.grad.add_(0.01)
    if doing == "all make gradients":
        for each in trained:
            each.grad = torch.ones_like(each)


def change_weights(doing: str, model: Any, weight: Any, optimizer: Any, copy: Any) -> None:
    import torch

    import photinus

    with torch.no_grad():
        if doing == "weight changed":
            weight.add_(1e-3)
        if doing == "frozen weight changed":
            photinus.unwrap(model)[2].weight.mul_(1.5)
        if doing == "element changed":
            weight[0, 0] += 1e-3
        if doing in ("weights changed at the end", "all change weights"):
            weight.mul_(1.5)
        if doing == "weights changed by data":
            weight.data.mul_(1.5)
        if doing == "weights loaded":
            model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})
    if doing in ("moments changed", "moments changed at the end", "all change moments"):
        for state in optimizer.state.values():
            state["exp_avg"].mul_(2)
    bias = optimizer.param_groups[0]["params"][1]
    if doing == "all reset moments of a layer" and bias in optimizer.state:  # "zero1": of one rank
        optimizer.state[bias]["exp_avg"].zero_()
    if doing in ("states loaded", "all load states"):
        state = copy.deepcopy(torch.optim.Optimizer.state_dict(optimizer))
        for each in state["state"].values():
            each["exp_avg"] = each["exp_avg"] * 2
        optimizer.load_state_dict(state)
    if doing == "states cleared":
        optimizer.state.clear()
