"""Runs with random options, cut off at a random batch and resumed elsewhere, end as the run that nothing happened to.

A seed decides everything. Three processes go through the seeds; each rank of each start of a run is a child of theirs,
so that it can die as ranks do. Without dropout and in float64, runs of any strategy and world size are alike to
rounding; a run that is resumed as it was cut off has the straight run's bits, with dropout too.

One seed alone: RANDOM_RUNS=17 pytest tests/faults/test_random_runs.py
"""

from __future__ import annotations

import importlib
import json
import os
import random
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler as schedules

import photinus
import photinus.trainer.loop
import photinus.trainer.trainer
from photinus.runlog.tables import read_rows
from photinus.trainer.checkpoint.folder import find_checkpoint
from tests.ranks import run_ranks, values
from tests.small_run import QUIET

FEATURES = 5
_RANKS = 3
_FIRST_SEED = 1000
_DEADLINE_S = 60.0  # of one start


class Lion(torch.optim.Optimizer):
    """As people write their own: no `differentiable`, no `foreach`."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (each for each in group["params"] if each.grad is not None):
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_((average * first + p.grad * (1 - first)).sign() * group["lr"])
                average.mul_(second).add_(p.grad * (1 - second))


class Tally:
    """An object of the user's that is saved with the run."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Points(torch.utils.data.Dataset[Any]):
    """Sample i is a point, its class and i."""

    def __init__(self, samples: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(3)
        self.targets = torch.randint(3, (samples,), generator=generator)
        self.points = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64).to(dtype)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, tuple[Tensor, int]]:
        return self.points[index], (self.targets[index], index)


def plan(seed: int) -> dict[str, Any]:
    """The options of a run, and its starts: the straight run, one or two that are cut off, and the last."""
    r = random.Random(seed)
    same = r.random() < 0.4
    where = [(r.randint(1, _RANKS), r.choice(["ddp", "zero1", "zero2", "zero3"])) for _ in range(3)]
    options: dict[str, Any] = {
        "batch_size": r.randint(4, 8),
        "accumulate": r.choice([1, 1, 2, 3]),
        "optimizer": r.choice(["sgd", "adamw", "lion"]),
        "scheduler": r.choice([None, "step", "epoch"]),
        "clip": r.choice([None, 0.3]),
        "save_every_steps": r.choice([None, None, 1, 2, 3, 5]),
        "save_at_once": r.random() < 0.5,  # the default by time, where no time has to pass
        "shuffle": r.random() < 0.7,
        "drop_last": r.random() < 0.5,
        "num_workers": r.choice([0, 0, 0, 2]),
        "samples": r.randint(17, 31),
        "by": r.choice(["Trainer", "Loop"]),
        "tally": r.random() < 0.5,
        "dropout": 0.3 if same else 0.0,
        "seed": seed,
    }
    left = options["samples"] % options["batch_size"]
    options["samples"] += _RANKS - left if 0 < left < _RANKS else 0  # a batch needs a sample for each rank
    per_epoch = options["samples"] // options["batch_size"]
    per_epoch += (not options["drop_last"]) and options["samples"] % options["batch_size"] > 0
    per_epoch = -(-per_epoch // options["accumulate"])  # steps, from here on
    steps, epochs = r.randint(min(3, 3 * per_epoch), 3 * per_epoch), r.randint(1, 3)
    options |= {"steps": steps, "epochs": None} if r.random() < 0.5 else {"steps": None, "epochs": epochs}
    last = options["steps"] or epochs * per_epoch
    cuts = [(r.randint(1, last), r.random(), r.choice(["exit", "raise"])) for _ in range(r.choice([1, 1, 2]))]
    straight = where[0] if same else (1, "ddp")
    starts = [(*straight, None), *((*where[0 if same else i], cut) for i, cut in enumerate([*cuts, None]))]
    return {"options": options, "starts": starts, "same": same}


class _Watched(photinus.Loop):
    """Notes itself, so that a loss function knows the step."""

    now: photinus.Loop

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _Watched.now = self


def one_rank(rank: int, world_size: int, strategy: str, cut: Any, out: Path, log: Path, o: dict[str, Any]) -> None:
    """A rank's life in one start of a run."""
    dtype = torch.float32 if o["dropout"] else torch.float64
    dying = None if cut is None else int(cut[1] * world_size)

    def loss_fn(outputs: Tensor, targets: Any) -> Tensor:
        step = _Watched.now.step
        with open(log, "a") as file:
            file.write(json.dumps([step, targets[1].tolist()]) + "\n")
        if cut is not None and step == cut[0] and rank == dying:
            if cut[2] == "exit":
                os._exit(9)
            raise RuntimeError("cut off")
        return cross_entropy(outputs, targets[0])

    with photinus.init(device="cpu", seed=o["seed"]):
        model = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Dropout(o["dropout"]), nn.Linear(7, 3)).to(dtype)
        makers: dict[str, Any] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
            "lion": lambda p: Lion(p, lr=0.01),
        }
        optimizer = makers[o["optimizer"]](model.parameters())
        scheduler = None if o["scheduler"] is None else schedules.CosineAnnealingLR(optimizer, 40)
        tally = Tally()
        common: dict[str, Any] = {"epochs": o["epochs"], "steps": o["steps"], "out": out, "report": QUIET}
        common["save"] = photinus.Saving(every_steps=o["save_every_steps"])
        if o["save_at_once"]:
            photinus.trainer.loop._SAVE_AFTER_S, photinus.trainer.loop._MOST_COST = 0.0, 1.0
        optimizer.register_step_post_hook(lambda *_: setattr(tally, "steps", tally.steps + 1))
        order = {name: o[name] for name in ("batch_size", "shuffle", "drop_last", "num_workers")}
        train_set: Any = photinus.loader(Points(o["samples"], dtype), **order)
        if o["by"] == "Trainer":
            photinus.trainer.trainer.Loop = _Watched  # type: ignore[misc]
            photinus.Trainer(
                model, optimizer, loss_fn, strategy=strategy, accumulate=o["accumulate"], clip_norm=o["clip"],
                scheduler=scheduler, scheduler_every=o["scheduler"] or "epoch", **common,
            ).fit(train_set)  # fmt: skip
            return
        wrapped, optimizer = photinus.wrap(model, optimizer, strategy=strategy)
        state = {"scheduler": scheduler, "tally": tally if o["tally"] else None}
        state = {name: each for name, each in state.items() if each is not None}
        loop = _Watched(wrapped, optimizer, train_set, state=state, accumulate=o["accumulate"], **common)
        for inputs, targets in loop:
            loop.backward(loss_fn(wrapped(inputs), targets))
            if loop.step_due:
                if o["clip"] is not None:
                    loop.clip(o["clip"])
                optimizer.step()
                optimizer.zero_grad()
                if o["scheduler"] == "step" and scheduler is not None:
                    scheduler.step()
            if o["scheduler"] == "epoch" and loop.epoch_ended and scheduler is not None:
                scheduler.step()


def start(rank: int, number: int, folder: Path, the_plan: dict[str, Any]) -> str | None:
    """One start of a run, of which this process has a child; returns what went wrong on this rank."""
    world_size, strategy, cut = the_plan["starts"][number]
    if rank >= world_size:
        return None
    log = folder / f"samples-{number}-{rank}"
    if rank == 0:
        saved = [int(path.name.split("-")[1]) for path in (folder / "run" / "checkpoints").glob("step-*")]
        (folder / f"saved-{number}").write_text(str(max(saved, default=0)))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
            store = dist.FileStore(str(folder / f"store-{number}"), world_size)
            dist.init_process_group("photinus", store=store, rank=rank, world_size=world_size)
            out = folder / ("straight" if number == 0 else "run")
            one_rank(rank, world_size, strategy, cut, out, log, the_plan["options"])
            code = 0
        except BaseException:  # noqa: BLE001 - the child ends here, and its parent says so
            if cut is None:
                traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + _DEADLINE_S
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return f"start {number}, rank {rank}: past its deadline"
        time.sleep(0.005)
    return f"start {number}, rank {rank}: exit code {ended[1]}" if ended[1] and cut is None else None


def samples_of(folder: Path, numbers: range) -> dict[int, list[int]]:
    """By step the samples that all ranks saw; of steps that were done twice the last time counts."""
    found: dict[int, list[int]] = {}
    for number in numbers:
        of_this: dict[int, list[int]] = {}
        for log in folder.glob(f"samples-{number}-*"):
            for line in log.read_text().splitlines():
                step, samples = json.loads(line)
                of_this[step] = of_this.get(step, []) + samples
        found |= of_this
    return {step: sorted(samples) for step, samples in sorted(found.items())}


def differences(folder: Path, the_plan: dict[str, Any]) -> list[str]:
    """What the run that was cut off has otherwise than the straight one."""
    exact, told = the_plan["same"], []
    rtol, atol = (0.0, 0.0) if exact else (1e-7, 1e-9)
    straight, run = folder / "straight", folder / "run"
    wanted, got = samples_of(folder, range(1)), samples_of(folder, range(1, len(the_plan["starts"])))
    if wanted != got:
        told.append(f"samples: {wanted} != {got}")
    for number in range(1, len(the_plan["starts"])):  # a run that always began anew would end alike
        saved = int((folder / f"saved-{number}").read_text())
        began = min(samples_of(folder, range(number, number + 1)), default=None)
        if began not in (None, saved + 1):
            told.append(f"start {number} began with step {began} where a checkpoint of step {saved} was")
    columns = {"losses.csv": ("step", "epoch", "loss", "samples"), "metrics.csv": ("epoch", "step", "loss")}
    for name, kept in columns.items():
        rows = [[[row[c] for c in kept if c in row] for row in read_rows(each / name)] for each in (straight, run)]
        if len(rows[0]) != len(rows[1]):
            told.append(f"{name}: {len(rows[0])} rows, and {len(rows[1])}")
        a, b = (torch.tensor(each, dtype=torch.float64) for each in rows)
        if a.shape == b.shape and not torch.allclose(a, b, rtol=0.0 if exact else 1e-5, atol=0.0, equal_nan=True):
            told.append(f"{name}: {rows[0]} != {rows[1]}")
    states = [find_checkpoint(each).load() for each in (straight, run)]
    for name in states[0].keys() - {"position", "run", "rng"}:
        a, b = (flat(each[name]) for each in states)
        if list(a) != list(b):
            told.append(f"{name}: {list(a)} != {list(b)}")
            continue
        for key, value in a.items():
            if isinstance(value, Tensor):
                if not torch.allclose(value.double(), b[key].double(), rtol=rtol, atol=atol):
                    told.append(f"{name} {key}: {(value.double() - b[key].double()).abs().max()} apart")
            elif value != b[key] and not (isinstance(value, float) and abs(value - b[key]) <= rtol * abs(value)):
                told.append(f"{name} {key}: {value} != {b[key]}")
    places = [{k: each["position"][k] for k in ("step", "epochs_done", "batches_done")} for each in states]
    return told + ([f"{places[0]} != {places[1]}"] if places[0] != places[1] else [])


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """The tensors, numbers and texts of a state, by their place."""
    if isinstance(value, dict):
        return {k: v for key in sorted(value, key=str) for k, v in flat(value[key], f"{name}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{name}[{i}]").items()}
    return {name: value}


def run_seeds(rank: int, world_size: int, seeds: list[int]) -> list[str]:
    """Goes through the seeds; returns on rank 0 what was wrong."""
    torch.set_num_threads(1)
    for module in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim"):
        importlib.import_module(module)  # once, and not in each child
    wrong = []
    for seed in seeds:
        the_plan = plan(seed)
        folder = Path(os.environ["RUNS_FOLDER"], str(seed))
        folder.mkdir(exist_ok=True)
        try:
            told = [start(rank, number, folder, the_plan) for number in range(len(the_plan["starts"]))]
            found = [each for each in told if each]
            found += differences(folder, the_plan) if rank == 0 and not found else []
        except Exception:  # noqa: BLE001 - with the seed
            found = [traceback.format_exc()]
        if found:
            wrong.append(f"RANDOM_RUNS={seed}: {the_plan}\n  " + "\n  ".join(found))
    return wrong


def _check(seeds: list[int], timeout_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix="photinus-test-") as folder:
        environ = {"RUNS_FOLDER": folder, "PHOTINUS_TIMEOUT_S": "30"}
        ranks = run_ranks(
            "tests.faults.test_random_runs:run_seeds", world_size=_RANKS, timeout_s=timeout_s, environ=environ,
            arguments={"seeds": seeds},
        )  # fmt: skip
        wrong = [text for found in values(ranks) for text in found]
    assert not wrong, "\n".join([*wrong, *(result.output[-3000:] for result in ranks)])


def test_runs_that_are_cut_off_and_resumed_elsewhere_end_as_the_straight_run() -> None:
    alone = os.environ.get("RANDOM_RUNS")
    _check([int(alone)] if alone else list(range(_FIRST_SEED, _FIRST_SEED + 20)), 230.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_many_runs_that_are_cut_off_and_resumed_elsewhere_end_as_the_straight_run(first: int) -> None:
    _check(list(range(first, first + 50)), 840.0)
