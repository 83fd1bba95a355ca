"""All optimizers of torch.optim, and three as people write their own: the base class, defaults, a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """The usual ten lines."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(torch.lerp(p.grad, average, group["betas"][0]).sign_(), alpha=group["lr"])
                average.lerp_(p.grad, 1 - group["betas"][1])


class Buffered(Optimizer):
    """Remembers things in its groups, too, and has a `__setstate__` of its own, as the first RAdam."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "buffer": [[None, None] for _ in range(3)]})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                kept = group["buffer"][state["step"] % 3]
                if kept[0] != state["step"]:
                    kept[:] = state["step"], (kept[1] or 0.0) + group["lr"] / state["step"]
                p.sub_(p.grad, alpha=kept[1])


class ScheduleFree(Optimizer):
    """SGD of the package schedulefree, in short: it trains y, and x, an average of the way, is to be used."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "k": 0, "train_mode": False})

    def eval(self) -> None:
        self._switch(False, lambda momentum: 1 - 1 / momentum)

    def train(self) -> None:
        self._switch(True, lambda momentum: 1 - momentum)

    @torch.no_grad()
    def _switch(self, mode: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] is not mode else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight(group["momentum"]))
            group["train_mode"] = mode

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            for p in filter(lambda p: p.grad is not None, group["params"]):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"])
                p.sub_(p.grad, alpha=group["lr"] * (1 - group["momentum"] * (1 - 1 / group["k"])))
                z.sub_(p.grad, alpha=group["lr"])


class Rateless(Optimizer):
    """Finds its rates itself: a group has no learning rate (COCOB), or None (relative steps)."""

    def __init__(self, params: Any, alpha: float = 10.0, **rate: Any) -> None:
        super().__init__(params, {"alpha": alpha, **rate})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                seen = self.state[p].setdefault("seen", torch.zeros_like(p))
                seen += p.grad.abs()
                p.sub_(p.grad / (seen + group["alpha"]))


def _of_torch(kind: str) -> Callable[[Any], Optimizer]:
    options = {"lr": 0.01, "momentum": 0.9} if kind == "SGD" else {}
    return lambda params: getattr(torch.optim, kind)(params, **options)  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    **{kind: _of_torch(kind) for kind in dir(torch.optim) if kind[:1].isupper() and kind != "Optimizer"},
    "Lion": Lion,
    "Buffered": Buffered,
    "Rateless": Rateless,
    "lr=None": lambda params: Rateless(params, lr=None),
}


class Matrices(torch.nn.Module):
    """Of matrices alone, which all of them can step; `sparse` gradients for SparseAdam."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 3, sparse=sparse)
        self.out = None if sparse else torch.nn.Linear(3, 2, bias=False)

    def forward(self, numbers: Tensor) -> Tensor:
        hidden = self.embedding(numbers)
        return (hidden if self.out is None else self.out(hidden)).sum(1)  # type: ignore[no-any-return]


def make_step(optimizer: Optimizer, backward: Callable[[], Tensor]) -> None:
    """One step on the gradients that `backward` makes; LBFGS wants it as a closure."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward()

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
