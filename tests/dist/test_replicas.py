"""Ranks that would train on side by side, each with an optimizer or with weights of its own, are stopped and told why.

Each world runs all its cases in one start of the processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import photinus
from photinus.parallel.exchange.verify_models import _sides, digest_of
from tests.ranks import run_ranks, values
from tests.small_run import QUIET

STEPS = 12  # of an epoch


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test reads it
        return f"{type(error).__name__}: {error}"
    return "no error"


def _model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def _train(
    *,
    change: Callable[[torch.nn.Module, Any, int], None] = lambda model, optimizer, step: None,
    strategy: str = "ddp",
    make: Callable[[Any], Any] = lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    late: bool = False,
    beside: Callable[[torch.nn.Module], dict[str, Any]] = lambda model: {},
    wrapping: dict[str, Any] | None = None,
    **options: Any,
) -> int:
    """Steps done, when nobody minds. `late`: the optimizer is made after wrap, so that only the loop sees it."""
    plain = _model()
    optimizer = None if late else make(plain.parameters())
    model = photinus.wrap(plain, *([] if late else [optimizer]), strategy=strategy, **(wrapping or {}))
    model = model if late else model[0]
    optimizer = make(model.parameters()) if late else optimizer
    data = TensorDataset(torch.linspace(-1, 1, 36 * STEPS).reshape(-1, 3))
    loop = photinus.Loop(model, optimizer, data, batch_size=12, epochs=1, report=QUIET,
                         state=beside(plain), **options)  # fmt: skip
    for (x,) in loop:
        loop.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        change(plain, optimizer, loop.step)
    return loop.step


def cases(rank: int, world_size: int, out: str) -> dict[str, str]:
    odd = rank == 1
    rate = 0.2 if odd else 0.1

    def other_class(parameters: Any) -> Any:
        return torch.optim.Adam(parameters, lr=0.1) if odd else torch.optim.SGD(parameters, lr=0.1)

    def other_groups(parameters: Any) -> Any:
        first, *rest = parameters
        groups = [{"params": [first, *rest[:1]]}, {"params": rest[1:]}]
        return torch.optim.SGD(groups if odd else [{"params": [first]}, {"params": rest}], lr=0.1)

    def change_weights(model: Any, optimizer: Any, step: int) -> None:
        if odd and step == 5:
            with torch.no_grad():
                model[2].weight[0, 3] += 1e-3

    def change_rate(model: Any, optimizer: Any, step: int) -> None:
        if odd and step == 5:
            optimizer.param_groups[0]["lr"] = 0.05

    def second(is_wrapped: bool, *names: str) -> dict[str, Any]:
        torch.manual_seed(rank)
        model: Any = torch.nn.Linear(3, 1)
        steps = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_wrapped:
            model, steps = photinus.wrap(model, steps)
        found = {"critic": model, "pair": torch.nn.ModuleList([model]), "steps": steps, "average": AveragedModel(model)}
        return {name: found[name] for name in names}

    loop_alone = {"check_ranks": False}  # DDP looks by itself, and would often be the first to see it
    with photinus.init(device="cpu"):
        return {
            "rate": _error(lambda: _train(make=lambda p: torch.optim.SGD(p, lr=rate))),
            "rate, late": _error(lambda: _train(make=lambda p: torch.optim.SGD(p, lr=rate), late=True)),
            "class": _error(lambda: _train(make=other_class)),
            "class, late": _error(lambda: _train(make=other_class, late=True)),
            "groups": _error(lambda: _train(make=other_groups)),
            "strategy": _error(lambda: _train(strategy="zero1" if odd else "ddp")),
            "plain critic": _error(lambda: _train(beside=lambda _: second(False, "critic", "steps"))),
            "temperature": _error(lambda: _train(beside=lambda _: second(False, "steps"))),
            "wrapped critic": _error(lambda: _train(beside=lambda _: second(True, "critic", "steps"))),
            "wrapped inside": _error(lambda: _train(beside=lambda _: second(True, "pair", "steps"))),
            "average": _error(lambda: _train(beside=lambda _: second(False, "average"))),
            "part of the model": _error(
                lambda: _train(beside=lambda model: {"steps": torch.optim.SGD(model[2].parameters(), lr=0.1)})
            ),
            "scheduler on one rank": _error(lambda: _train(change=change_rate, wrapping=loop_alone)),
            "weights, torch-ddp": _error(
                lambda: _train(change=change_weights, strategy="torch-ddp", out=Path(out, "torch"))
            ),
            "weights, on purpose": _error(
                lambda: _train(
                    change=change_weights,
                    wrapping=loop_alone,
                    out=Path(out, "on purpose"),
                )
            ),
            **{name: _error(lambda name=name: _train(strategy=name)) for name in ("ddp", "zero1", "zero3")},
        }


GIVEN = "ValueError: the ranks were given different "
SAID = {
    "rate": GIVEN + "things to wrap: optimizer, group 0, lr=0.1 on rank 0, 0.2 on rank 1. All need the same.",
    "rate, late": GIVEN + "loops: optimizer, group 0, lr=0.1 on rank 0, 0.2 on rank 1. All need the same.",
    "class": GIVEN + "things to wrap: optimizer=SGD on rank 0, Adam on rank 1; ",
    "class, late": GIVEN + "loops: optimizer=SGD on rank 0, Adam on rank 1; ",
    "groups": GIVEN + "things to wrap: optimizer, group 1, parameter 0=0.bias on rank 0, 2.weight on rank 1; ",
    "strategy": GIVEN + "things to wrap: strategy=ddp on rank 0, zero1 on rank 1. All need the same.",
    "plain critic": "ValueError: state['steps'] (SGD) steps 2 parameters of state['critic'] (Linear), which nothing "
    "averages: 3 ranks would train 3 different models. Wrap that model with its optimizer, `",
    "temperature": "ValueError: state['steps'] (SGD) steps 2 parameters of none of the models given to the loop, ",
    "wrapped critic": "no error",
    "wrapped inside": "no error",
    "average": "no error",
    "part of the model": "no error",
    "weights, on purpose": "no error",
    "ddp": "no error",
    "zero1": "no error",
    "zero3": "no error",
}


def test_ranks_that_train_differently_are_told_so(tmp_path: Path) -> None:
    function, arguments = "tests.dist.test_replicas:cases", {"out": str(tmp_path)}
    for rank in values(run_ranks(function, world_size=3, backend="photinus", arguments=arguments)):
        for case, words in SAID.items():
            assert rank[case].startswith(words), (case, rank[case])
        late = r"ValueError: the ranks' optimizers differ after step \d+: optimizer, group 0, lr=0.1 on rank 0, 0.05 "
        assert re.match(late, rank["scheduler on one rank"]), rank["scheduler on one rank"]
        weights = rank["weights, torch-ddp"]
        told = re.match(r"ModelMismatchError: after step (\d+) the ranks hold different weights: ", weights)
        assert told, weights
        assert "rank 1 has other values than ranks 0, 2 in parameter 2.weight [1, 4]" in weights
        assert 5 <= int(told[1]) <= STEPS
    assert not list(tmp_path.glob("torch/checkpoints/step-*"))  # of the epoch's end: it would keep the wrong weights


def test_of_two_ranks_nobody_can_say_which_is_wrong() -> None:
    assert _sides([1, 3]) == "rank 0 and rank 1 have different values"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_the_digest_of_a_parameter_sees_every_element_wherever_it_lies(dtype: torch.dtype) -> None:
    for size in (1, 2, 3, 21):
        for offset in (0, 1):
            whole = torch.zeros(size + offset, dtype=dtype)
            before = digest_of(whole[offset:]).item()
            for place in range(offset, size + offset):
                changed = whole.clone()
                changed[place] = 1
                assert digest_of(changed[offset:]).item() != before
