"""Trainings under any strategy, for a pool of rank processes: `Cases` does what a command says and tells numbers."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import photinus
from photinus.parallel import STRATEGIES, strategy_of
from photinus.parallel.zero.split_states import is_split
from photinus.trainer.checkpoint.states import load_into, state_of
from tests.optimizers import KINDS, Matrices, make_step
from tests.small_run import QUIET

TOKENS, WIDTH, BATCH = 11, 6, 12
DEVICE = os.environ.get("DEVICE_OF_TEST", "cpu")
SHARDED = ("zero2", "zero3")
SHARING = ("ddp", "zero1", "zero2", "zero3")  # strategies for several processes, besides torch-ddp


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH), nn.Tanh()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.act(self.up(hidden)))


class Net(nn.Module):
    """Everything that strategies can get wrong: tied weights, a frozen layer, buffers, layers without parameters,
    dimensions that no world size divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        # Nothing with a bias lies right before the norm: its gradient would be a rounding error, of which AdamW makes
        # steps.
        hidden = self.norm(self.embedding(tokens).mean(dim=1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.frozen(hidden))  # type: ignore[no-any-return]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens int64 [12, 3] and targets int64 [12]."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(TOKENS, (BATCH, 3), generator=generator)
    tokens = tokens.to(DEVICE)
    return tokens, tokens.sum(dim=1) % TOKENS


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, fused=True),
}


class Training:
    """A model, an optimizer with two groups, and a scheduler that was made before the model is wrapped."""

    def __init__(self, strategy: str | None, optimizer: str = "adamw", seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        net = Net()
        decayed = [parameter for name, parameter in net.named_parameters() if "bias" not in name]
        others = [parameter for name, parameter in net.named_parameters() if "bias" in name]
        self.optimizer = OPTIMIZERS[optimizer]([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
        self.made_as = type(self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        if strategy in SHARDED:
            options = {"shard": [Block], **options}
        self.model: nn.Module = net
        if strategy is not None:
            self.model, given_back = photinus.wrap(net, self.optimizer, strategy=strategy, **options)
            assert given_back is self.optimizer
        self.verbs = strategy_of(self.model)
        self.between: Callable[[], None] = lambda: None  # backward and step

    def step(
        self, number: int, *, parts: int = 1, clip: float | None = None, scaler: Any = None, autocast: bool = False
    ) -> dict[str, float]:
        """One step on a global batch, in `parts` backwards; what happened, as this rank sees it."""
        shared = self.model is not self.verbs.unwrap(self.model) or self.verbs.splits(self.model)
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
        tokens, targets = (values.chunk(world_size)[rank] for values in batch(number))
        told: dict[str, float] = {"loss": 0.0}
        pieces = list(zip(tokens.chunk(parts), targets.chunk(parts), strict=True))
        for part, (x, y) in enumerate(pieces):
            with self.verbs.no_sync(self.model) if part < parts - 1 else nullcontext():
                with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                    loss = cross_entropy(self.model(x), y) / parts
                (loss if scaler is None else scaler.scale(loss)).backward()
            told["loss"] += float(loss.detach())
        if clip is not None:
            told["norm"] = float(self.verbs.clip(self.model, clip))
        self.between()
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
        if scaler is not None:
            scaler.update()
            told["scale"] = scaler.get_scale()
        self.optimizer.zero_grad()
        self.scheduler.step()
        told["rate"] = self.optimizer.param_groups[0]["lr"]
        return told

    def run(self, steps: range, **options: Any) -> list[dict[str, float]]:
        return [self.step(number, **options) for number in steps]

    def states(self) -> dict[str, Any]:
        """The whole states; of use on rank 0. All ranks call it."""
        return {"model": state_of(self.model), "optimizer": state_of(self.optimizer)}


def numbers(state: Any) -> Any:
    """A state as JSON: tensors as lists of all their numbers."""
    if isinstance(state, Tensor):
        return state.double().flatten().tolist()
    if isinstance(state, dict):
        return {str(key): numbers(value) for key, value in state.items()}
    return [numbers(value) for value in state] if isinstance(state, (list, tuple)) else state


def held_by(training: Training) -> dict[str, int]:
    """How many numbers this rank holds: of parameters, and of the optimizer's state."""
    local = [p.to_local() if is_split(p) else p for p in training.model.parameters()]
    remembered = [value for state in training.optimizer.state.values() for value in state.values()]
    values = [v.to_local() if is_split(v) else v for v in remembered]
    return {"parameters": sum(p.numel() for p in local), "optimizer": sum(v.numel() for v in values if v.dim())}


class Payload:
    """Runs code where it is unpickled: it makes a file."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.marker),))


class Cases:
    """What each rank of the pool does, by the command's "do"."""

    strict = True

    def __init__(self, rank: int, world_size: int, address: str) -> None:
        if self.strict:
            warnings.simplefilter("error", UserWarning)  # a scheduler that believes it came before the optimizer
        torch.set_num_threads(1)
        self.rank, self.world_size = rank, world_size
        store = dist.FileStore(os.environ["STORE_OF_TEST"], world_size)
        dist.init_process_group(os.environ["BACKEND_OF_TEST"], store=store, rank=rank, world_size=world_size)
        self.session = photinus.init(device=DEVICE)

    def __call__(self, command: dict[str, Any]) -> Any:
        rest = {name: value for name, value in command.items() if name != "do"}
        return getattr(self, command["do"])(**rest)

    def train(self, strategy: str | None, steps: int = 5, seed: int | None = None, **options: Any) -> Any:
        """A whole training; every rank's start differs unless `seed` is given, so wrap has to make them equal."""
        setting = {name: options.pop(name) for name in ("optimizer",) if name in options}
        own_seed = (7 + self.rank if strategy is not None else 7) if seed is None else seed
        training = Training(strategy, seed=own_seed, **setting)
        told = training.run(range(steps), **options)
        assert isinstance(training.optimizer, training.made_as)
        return {"steps": told, **numbers(training.states())}

    def average(self, strategy: str) -> Any:
        """The moving average of a training's weights, and what it makes of a batch."""
        torch.manual_seed(7)
        net = Net()
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = OPTIMIZERS["adamw"](net.parameters())
        model, optimizer = photinus.wrap(net, optimizer, strategy=strategy)
        if strategy in SHARDED:
            average.module = photinus.wrap(average.module, strategy=strategy)
        for number in range(4):
            tokens, targets = (values.chunk(self.world_size)[self.rank] for values in batch(number))
            cross_entropy(model(tokens), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        with torch.no_grad():
            return {"state": numbers(state_of(average)), "output": numbers(average.eval()(batch(9)[0]))}

    def save(self, strategy: str, path: str, steps: int = 3) -> Any:
        """Trains, saves, and tells the losses of two further steps."""
        training = Training(strategy)
        training.run(range(steps))
        photinus.save(path, model=training.model, optimizer=training.optimizer, scheduler=training.scheduler)
        parameters = numbers(state_of(training.model))
        return {"parameters": parameters, "further": training.run(range(steps, steps + 2))}

    def load(self, strategy: str | None, path: str, steps: int = 3) -> Any:
        """Loads into another training, and tells the same."""
        training = Training(strategy, seed=99)
        training.run(range(1))  # what it remembers of this must go
        photinus.load(path, model=training.model, optimizer=training.optimizer, scheduler=training.scheduler)
        parameters = numbers(state_of(training.model))
        held = held_by(training)["optimizer"]
        return {"parameters": parameters, "held": held, "further": training.run(range(steps, steps + 2))}

    def load_each(self, strategy: str, folder: str) -> dict[str, str]:
        """By optimizer: whether a training that is saved and loaded by photinus.save and load goes on with the same
        bits, or the error."""

        def made(kind: str) -> tuple[Any, Any, Callable[[], Tensor]]:
            torch.manual_seed(3)
            net = Matrices(sparse=kind == "SparseAdam")
            model, optimizer = photinus.wrap(net, KINDS[kind](list(net.parameters())), strategy=strategy)
            return model, optimizer, lambda: backward(model)

        def backward(model: nn.Module) -> Tensor:
            loss = model(torch.tensor([self.rank, 2])).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        found = {}
        for kind in KINDS:
            try:
                model, optimizer, closure = made(kind)
                make_step(optimizer, closure)
                path = f"{folder}/{kind}.pt"
                photinus.save(path, model=model, optimizer=optimizer)
                make_step(optimizer, closure)
                other, other_optimizer, closure = made(kind)
                for _ in range(2):  # the first may leave something behind in the optimizer
                    photinus.load(path, model=other, optimizer=other_optimizer)
                make_step(other_optimizer, closure)
                found[kind] = "same" if numbers(state_of(other)) == numbers(state_of(model)) else "different"
            except (TypeError, ValueError, photinus.PhotinusError) as error:
                found[kind] = f"{type(error).__name__}: {error}"
        return found

    def remembered(self, path: str, marker: str | None) -> Any:
        """Saves a split optimizer that remembers odd things, on rank 1 one whose unpickling leaves a marker."""
        training = Training("zero1")
        training.run(range(2))
        for parameter, state in training.optimizer.state.items():
            state["odd"] = [("text", None, True, 2.5), {3: torch.zeros(0), "half": parameter.detach().bfloat16()}]
        if marker is not None and self.rank == 1:
            state["odd"] = Payload(marker)
        try:
            photinus.save(path, optimizer=training.optimizer)
        except TypeError as error:
            return str(error)
        states = torch.load(path, weights_only=True)["optimizer"]["state"]
        parameters = [p for group in training.optimizer.param_groups for p in group["params"]]
        right = [
            numbers(states[i]["odd"]) == [["text", None, True, 2.5], {"3": [], "half": numbers(p.detach().bfloat16())}]
            for i, p in enumerate(parameters)
            if p.requires_grad
        ]
        return [list(states) == sorted(states), len(right), all(right), str(states[0]["odd"][1]["half"].dtype)]

    def failed_load(self, strategy: str, path: str) -> Any:
        """A load in which the last object fails on the last rank: the states before and after, and the error."""
        other = Training(strategy, seed=1)
        other.run(range(3))
        training = Training(strategy, seed=99)
        training.run(range(2))

        class Stubborn:
            """Takes its own state and that of rank 0."""

            def state_dict(_) -> dict[str, Any]:  # noqa: N805
                return {"rank": self.rank}

            def load_state_dict(_, state: dict[str, Any]) -> None:  # noqa: N805
                if state["rank"] != self.rank and self.rank == self.world_size - 1:
                    raise RuntimeError("I do not want it")

        photinus.save(path, model=other.model, optimizer=other.optimizer, stubborn=Stubborn())
        before, error = numbers(training.states()), ""
        try:
            photinus.load(path, model=training.model, optimizer=training.optimizer, stubborn=Stubborn())
        except photinus.errors.CheckpointError as caught:
            error = str(caught)
        after = numbers(training.states())
        return {"before": before, "after": after, "error": error, "further": training.run(range(2, 4))}

    def held(self, strategy: str) -> Any:
        """How many numbers this rank holds after two steps: of parameters, and of the optimizer's state."""
        training = Training(strategy)
        training.run(range(2))
        return held_by(training)

    def overflow(self, strategy: str, optimizer: str) -> Any:
        """A step with a GradScaler where one number of one gradient, in the last rank's part, is infinite: all ranks
        have to leave the step out."""
        training = Training(strategy, optimizer)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=1)
        told = [training.step(0, scaler=scaler)]
        before = numbers(training.states())

        def spoil(*_: Any) -> None:
            parameter = training.optimizer.param_groups[0]["params"][0]
            if not is_split(parameter.grad):
                parameter.grad[-1, -1] = float("inf")
            elif self.rank == self.world_size - 1:
                parameter.grad.to_local()[-1, -1] = float("inf")

        training.between = spoil
        told.append(training.step(1, scaler=scaler))
        training.between = lambda: None
        after = numbers(training.states())
        for state in (before, after):
            state["model"] = {name: v for name, v in state["model"].items() if "norm." not in name}  # forward counts
        return {"steps": told, "same": before["model"] == after["model"], "finite": "inf" not in str(after)}

    def evaluate(self, strategy: str, samples: int) -> Any:
        """A validation with ranks that have different numbers of blocks, after a step."""
        training = Training(strategy)
        training.run(range(1))
        tokens = torch.cat([batch(step)[0] for step in range(3)])[:samples]
        dataset = TensorDataset(tokens, tokens.sum(dim=1) % TOKENS)
        return photinus.evaluate(
            training.model, dataset, lambda outputs, y: cross_entropy(outputs, y, reduction="none"), batch_size=4
        )

    def evaluate_inside_step(self, strategy: str) -> Any:
        """A forward for validation between backward and step: what it gathered must not be what is trained next."""
        training = Training(strategy)
        tokens, targets = (values.chunk(self.world_size)[self.rank] for values in batch(0))
        cross_entropy(training.model(tokens), targets).backward()
        with torch.no_grad():
            training.model.eval()(tokens)
            training.model.train()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return {"steps": training.run(range(1, 3)), **numbers(training.states())}

    def late_optimizer(self, strategy: str, when: str) -> Any:
        """The weights after steps of an optimizer that was not given to wrap, or the error.

        Before each step, or in its closure, stands one more forward with gradients, as for an accuracy.
        """
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        given = [optimizer] if strategy == "zero1" else []
        model = photinus.wrap(model, *given, strategy=strategy)
        model = model[0] if given else model
        if when == "gathered":
            model(torch.ones(1, 4))
        if when != "before":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure() -> Tensor:
            loss = model(torch.full((2, 4), 1.0 + self.rank)).square().mean()
            loss.backward()
            return loss + 0.0 * model(torch.ones(2, 4)).sum()

        try:
            for _ in range(3):
                optimizer.step(closure) if when == "closure" else (closure(), optimizer.step())
                optimizer.zero_grad()
        except photinus.PhotinusError as error:
            return str(error)
        return numbers(state_of(model))

    def changed_by_hand(self, strategy: str, how: str) -> Any:
        """The weights of a training in whose middle the user changes the optimizer, or the error."""
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = photinus.wrap(net, optimizer, strategy=strategy)
        try:
            for step in range(4):
                group = optimizer.param_groups[0]
                if step == 2 and how == "state":
                    optimizer.state = defaultdict(dict)
                elif step == 2 and how == "groups":
                    optimizer.param_groups = [{**group, "lr": 0.01}]
                elif step == 2 and how == "split":
                    last, group["params"] = group["params"][2:], group["params"][:2]
                    optimizer.param_groups.append({**group, "params": last, "lr": 0.01})
                elif step == 2:
                    optimizer.state_dict()
                model(torch.full((2, 4), 1.0 + self.rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        except photinus.PhotinusError as error:
            return str(error)
        return numbers(state_of(model))

    def clip(self, strategy: str, norm_type: float) -> Any:
        """The norm that clipping finds, and what it leaves of the gradients; parts of some parameters are empty."""
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        model, optimizer = photinus.wrap(net, torch.optim.SGD(net.parameters(), lr=1.0), strategy=strategy)
        model(torch.arange(8.0).reshape(2, 4) + self.rank).sum().backward()
        norm = strategy_of(model).clip(model, 0.5, norm_type)
        optimizer.step()
        return [norm.item(), numbers(state_of(model))]

    def odd_layout(self, strategy: str) -> Any:
        """The weights of a training in which stacks share a block and parameters are not contiguous."""

        class Shared(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                block = nn.Linear(300, 300)
                self.first, self.second = (
                    nn.Sequential(block, nn.Tanh()),
                    nn.Sequential(nn.Sequential(block), nn.Tanh()),
                )
                self.turned = nn.Parameter(torch.randn(4, 300).t())
                self.nothing = nn.Parameter(torch.empty(0, 3), requires_grad=False)

            def forward(self, x: Tensor) -> Tensor:
                return self.second(self.first(x)) @ self.turned + self.nothing.sum()  # type: ignore[no-any-return]

        torch.manual_seed(0)
        net = Shared()
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1e-4, momentum=0.9)
        model, optimizer = photinus.wrap(net, optimizer, strategy=strategy)
        for _ in range(3):
            model(torch.full((2, 300), 0.1 + self.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return numbers(state_of(model))

    def layer_by_layer(self, strategy: str) -> str:
        """The error of a model that calls the layers of its blocks, and not the blocks."""

        class Blocks(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList([Block()])

            def forward(self, x: Tensor) -> Tensor:
                return self.blocks[0].up(x)  # type: ignore[no-any-return, union-attr, operator]

        net = Blocks()
        model = photinus.wrap(net, strategy=strategy, shard=[Block])
        try:
            model(torch.ones(2, WIDTH))
        except RuntimeError as error:
            return str(error)
        return ""

    def ended_group(self, strategy: str) -> str:
        """The error of a forward over a process group that has ended."""
        group = dist.new_group()
        net = nn.Linear(2, 2)
        model = photinus.wrap(net, strategy=strategy, process_group=group)
        model(torch.ones(1, 2)).sum().backward()
        dist.destroy_process_group(group)
        try:
            model(torch.ones(1, 2))
        except (ValueError, RuntimeError) as error:
            return str(error)
        return ""

    def nested_no_sync(self, strategy: str) -> Any:
        """Whether leaving an inner no_sync leaves the outer one in force, and gradients differ between the ranks."""
        training = Training(strategy)
        verbs, model = training.verbs, training.model
        tokens, targets = (values.chunk(self.world_size)[self.rank] for values in batch(0))
        with verbs.no_sync(model):
            with verbs.no_sync(model):
                pass
            cross_entropy(model(tokens), targets).backward()
        averaged = [p.grad is not None for p in model.parameters() if p.requires_grad]
        return {"averaged": any(averaged) if strategy in SHARDED else None}

    def different_parameters(self, strategy: str, units: bool) -> Any:
        """Steps in which each rank uses other layers, which change from step to step, one of them never; in the middle
        gradients of two batches add up, and some are kept."""

        class Branches(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(6))

            def forward(self, x: Tensor, used: int) -> Tensor:
                return self.layers[5](self.layers[used](x))  # type: ignore[no-any-return]

        class Pair(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = Branches(), Branches()

            def forward(self, x: Tensor, used: int) -> Tensor:
                return self.second(self.first(x, used), used)  # type: ignore[no-any-return]

        torch.manual_seed(0)
        net = Pair()
        options = {"shard": [Branches]} if units and strategy in SHARDED else {}
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
        model, optimizer = photinus.wrap(net, optimizer, strategy=strategy, find_unused_parameters=True, **options)
        verbs = strategy_of(model)
        for step, used in enumerate(((0, 1), (2, 2), (0, 3), (1, 1), (3, 2), (2, 2))):
            with verbs.no_sync(model) if step == 2 else nullcontext():
                model(torch.ones(1, 2), used[self.rank]).sum().backward()
            if step != 2:
                optimizer.step()
            if step not in (2, 4):
                optimizer.zero_grad(set_to_none=step != 3)
        return numbers(state_of(model))

    def failing_evaluation(self, strategy: str) -> str:
        """The error of a validation whose metric fails on the last rank."""
        training = Training(strategy)
        tokens, _ = batch(0)

        def metric(outputs: Tensor, targets: Tensor) -> Tensor:
            if self.rank == self.world_size - 1:
                raise ZeroDivisionError("no such metric")
            return targets

        try:
            photinus.evaluate(training.model, TensorDataset(tokens, tokens[:, 0]), metric, batch_size=2)
        except Exception as error:  # noqa: BLE001 - it is what is asked for
            return f"{type(error).__name__}: {error}"
        return ""

    def save_alone(self, strategy: str, folder: str) -> str:
        """The error of saving on rank 0 alone."""
        training = Training(strategy)
        told = ""
        if self.rank == 0:
            try:
                state = {"optimizer": training.optimizer}
                photinus.trainer.CheckpointFolder(folder).save(1, state, description={})
            except TypeError as error:
                told = str(error)
        return told

    def start(self, strategy: str, differing: str) -> Any:
        """Wraps a model of which something differs between the ranks: the error, or its buffers."""
        model = nn.Sequential(nn.Linear(2, 2 + self.rank * (differing == "shape")), nn.BatchNorm1d(2))
        if differing == "buffers":
            model[1].running_mean.fill_(3.0 + self.rank)
        try:
            photinus.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
        except photinus.errors.ModelMismatchError as error:
            return str(error)
        return numbers(model[1].running_mean)

    def change_after_evaluation(self, strategy: str) -> Any:
        """The weights after a forward without gradients and a change by hand, as of a moving average."""
        torch.manual_seed(7)
        net = nn.Linear(2, 1, bias=False)
        model, _ = photinus.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1), strategy=strategy)
        with torch.no_grad():
            model(torch.ones(1, 2))
            for parameter in model.parameters():
                parameter.fill_(5.0)
            return [model(torch.ones(1, 2)).item(), numbers(state_of(model))]

    def refuse(self, strategy: str, what: str) -> Any:
        """The error that wrapping something unsuited raises, and whether the model is as it was."""
        model, options = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {}
        if what == "scalar":
            model[0].scale = nn.Parameter(torch.tensor(1.0))
        elif what == "empty":
            model[0].nothing = nn.Parameter(torch.empty(0, 3))
        elif what == "dtypes":
            model[0].double()
        elif what == "sparse":
            model.append(nn.Embedding(3, 2, sparse=True))
        elif what == "option":
            options = {"no_such_option": 1}
        elif what == "twice":
            model, _ = photinus.wrap(model, torch.optim.SGD(model.parameters()), strategy=strategy)
        kind = what if hasattr(torch.optim, what) else "SGD"
        optimizers = [] if what == "no optimizer" else [getattr(torch.optim, kind)(model.parameters(), lr=0.1)]
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        try:
            photinus.wrap(model, *optimizers, strategy=strategy, **options)
        except (ValueError, TypeError) as error:
            same = before == {name: id(parameter) for name, parameter in model.named_parameters()}
            return {"error": f"{type(error).__name__}: {error}", "untouched": same}
        return {"error": "", "untouched": False}

    def changed_after_wrap(self, strategy: str, change: str, steps: int) -> str:
        """What the first step says after parameters came, or were replaced, `steps` steps after wrapping."""
        training = Training(strategy)
        training.run(range(steps))
        model: Any = training.verbs.unwrap(training.model)
        if steps:
            training.model(batch(0)[0])  # what zero2 has gathered then is no change
        if change == "layer put in":
            model.blocks[0].up = nn.Sequential(model.blocks[0].up, nn.Linear(7, 7))
        elif change == "layer appended":
            model.blocks.append(Block())
        elif change == "assigned":
            model.load_state_dict(Net().state_dict(), assign=True)
        try:
            training.step(steps)
        except ValueError as error:
            return str(error)
        return "no error"

    def odd_starts(self, strategy: str) -> Any:
        """A model that was compiled before, a forward in inference mode before the first step, and copies."""
        torch.manual_seed(0)
        plain: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        average = AveragedModel(plain, use_buffers=True, avg_fn=get_ema_avg_fn(0.5))
        compiled: Any = torch.compile(plain, backend="eager")
        model, optimizer = photinus.wrap(
            compiled, torch.optim.SGD(compiled.parameters(), lr=0.1), strategy=strategy, shard=[nn.Linear]
        )
        average.module = photinus.wrap(average.module, strategy=strategy)
        later = AveragedModel(plain, use_buffers=True, avg_fn=get_ema_avg_fn(0.5))
        loop = photinus.Loop(model, optimizer, TensorDataset(torch.ones(4, 2)), batch_size=2, epochs=1, report=QUIET)
        with torch.inference_mode():
            plain(torch.ones(1, 2))
        for (x,) in loop:
            loop.backward(plain(x).sum())
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(plain)
            later.update_parameters(plain)
        with torch.inference_mode():
            plain(torch.ones(1, 2))
        averages = [numbers(state_of(each)) for each in (average, later)]
        return {"same": model is compiled, "averages": averages, "loss": loop.history[0]["loss"]}

    def load_plain(self, strategy: str) -> Any:
        """Whether a split model holds the plain state that it was given by its own load_state_dict, and steps on."""
        training = Training(strategy)
        torch.manual_seed(3)
        plain = Net()
        training.model.load_state_dict(plain.state_dict())
        state = numbers(state_of(training.model))
        training.run(range(2))
        trained = {name for name, _ in training.model.named_parameters()}
        gathered = sum(value is not None for name, value in state_of(training.model).items() if name in trained)
        return {"loaded": self.rank > 0 or state == numbers(plain.state_dict()), "gathered": gathered}

    def comm_buffers(self, strategy: str) -> int:
        """How often a step takes a buffer from the process group's own memory."""
        backend: Any = type(dist.group.WORLD._get_backend(torch.device("cpu")))  # type: ignore[union-attr]
        training, taken, original = Training(strategy), [], backend.allocate_tensor

        def counted(self: Any, size: int, **options: Any) -> Tensor:
            taken.append(size)
            return original(self, size, **options)  # type: ignore[no-any-return]

        backend.allocate_tensor = counted
        try:
            training.step(0)
        finally:
            backend.allocate_tensor = original
        return len(taken)

    def two_optimizers(self, strategy: str, out: str) -> Any:
        """A Loop with two optimizers, cut in the middle and gone on with."""

        def run(epochs: int, where: str | None) -> tuple[Any, Any]:
            torch.manual_seed(3)
            net = Net()
            first, second = list(net.blocks.parameters()), [p for n, p in net.named_parameters() if "blocks" not in n]
            model, one, two = photinus.wrap(
                net, torch.optim.AdamW(first, lr=0.02), torch.optim.SGD(second, lr=0.1, momentum=0.9), strategy=strategy
            )
            data = TensorDataset(*(torch.cat(parts) for parts in zip(*(batch(s) for s in range(3)), strict=True)))
            loop = photinus.Loop(model, one, data, batch_size=12, epochs=epochs, out=where, state={"two": two},
                report=QUIET)  # fmt: skip
            for x, y in loop:
                loop.backward(cross_entropy(model(x), y))
                loop.clip(1.0)
                for optimizer in (one, two):
                    optimizer.step()
                    optimizer.zero_grad()
            return [row["loss"] for row in loop.history], numbers(state_of(model))

        whole = run(4, None)
        run(2, out)
        return {"whole": whole, "resumed": run(4, out)}

    def checkpoint_files(self, folder: str) -> Any:
        """What plain torch reads from the newest checkpoint of a Loop."""
        newest = max(Path(folder, "checkpoints").glob("step-*"))
        net = Net()
        net.load_state_dict(torch.load(newest / "model.pt", weights_only=True))
        return numbers(net.state_dict())

    def strategies(self) -> list[str]:
        """Their names."""
        return list(STRATEGIES)


def plain_losses(path: str, steps: int = 3) -> list[float]:
    """The losses of two further steps in one process, with nothing of ours but the file's content."""
    saved = torch.load(path, weights_only=True)
    training = Training(None, seed=99)
    load_into(training.model, saved["model"])
    training.optimizer.load_state_dict(saved["optimizer"])
    training.scheduler.load_state_dict(saved["scheduler"])
    return [told["loss"] for told in training.run(range(steps, steps + 2))]
