"""Which submodules become units, and how optimizers are pointed at other parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from photinus.parallel.zero.sharded_optimizer import check_repointable, repoint
from photinus.parallel.zero.units import SMALLEST_UNIT_ELEMS, shard_units

WIDE = 260  # a Linear of this width is larger than the smallest unit


class Transformer(nn.Module):
    def __init__(self, *, tied_to_block: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDE)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDE), nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU())) for _ in range(3)
        )
        self.small = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(WIDE, WIDE)
        if tied_to_block:
            self.head.weight = self.blocks[1][1][0].weight


def _elems(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_by_default_the_blocks_of_the_outermost_stacks_are_units() -> None:
    model = Transformer()
    assert _elems(model.blocks[0]) >= SMALLEST_UNIT_ELEMS > _elems(model.small)
    assert set(shard_units(model)) == set(model.blocks)
    model.blocks = nn.ModuleList(nn.Linear(256, width, bias=False) for width in (256, 255))
    assert _elems(model.blocks[0]) == SMALLEST_UNIT_ELEMS
    assert shard_units(model) == [model.blocks[0]]


def test_a_model_that_is_a_stack_itself_is_cut_into_its_layers() -> None:
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(2, 2), nn.Linear(WIDE, WIDE))
    assert set(shard_units(model)) == {model[0], model[3]}


def test_a_model_without_stacks_is_one_unit() -> None:
    assert shard_units(nn.Linear(WIDE, WIDE)) == []


def test_a_block_that_shares_a_parameter_with_something_outside_is_no_unit() -> None:
    model = Transformer(tied_to_block=True)
    assert set(shard_units(model)) == {model.blocks[0], model.blocks[2]}
    assert set(shard_units(model, [nn.Linear])) == {model.blocks[0][1][0], model.blocks[2][1][0], model.small[0]}


def test_parameters_shared_inside_a_unit_are_its_own_affair() -> None:
    block = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE))
    block[1].weight = block[0].weight
    model = nn.ModuleDict({"stack": nn.ModuleList([block])})
    assert shard_units(model) == [block]


def test_classes_or_a_function_choose_units_and_inner_ones_come_first() -> None:
    model = Transformer()
    units = shard_units(model, [nn.Linear, nn.Sequential])
    assert len(units) == 3 * 3 + 2 + 1
    for i, unit in enumerate(units):
        assert not any(later in unit.modules() for later in units[i + 1 :])
    assert shard_units(model, lambda module: module is model.head) == [model.head]


def test_units_without_parameters_are_left_out() -> None:
    assert shard_units(nn.Sequential(nn.ReLU(), nn.Linear(1, 1)), [nn.ReLU]) == []


@pytest.mark.parametrize(
    ("shard", "error", "words"),
    [
        (nn.Linear, TypeError, "a list of module classes, or a function that takes a module"),
        ("blocks", TypeError, "a function that takes a module"),
        ([nn.Conv2d], ValueError, "none of its classes is in the model .Transformer.; it has modules of Embedding"),
        (lambda module: False, ValueError, "the function chose no submodule"),
        ([nn.ModuleList], ValueError, "a ModuleList has no forward"),
    ],
)
def test_rules_that_choose_nothing_or_what_cannot_be_a_unit_are_refused(
    shard: object, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        shard_units(Transformer(), shard)  # type: ignore[arg-type]


def test_a_repointed_optimizer_is_the_same_object_with_its_groups_hooks_and_memory() -> None:
    old = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.Adam([{"params": old[:1], "lr": 0.5}, {"params": old[1:]}], betas=(0.5, 0.6))
    for parameter in old:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    new = [nn.Parameter(parameter.detach().clone()) for parameter in old]
    groups = optimizer.param_groups
    repoint(optimizer, dict(zip(old, new, strict=True)), lambda value, parameter: value + 1)
    assert optimizer.param_groups is groups
    assert [group["params"] for group in groups] == [[new[0]], [new[1]]]
    assert groups[0]["lr"] == 0.5
    assert list(optimizer.state) == new
    assert optimizer.state[new[1]]["step"] == 1.0  # without dimensions: as it was
    torch.testing.assert_close(optimizer.state[new[1]]["exp_avg"], torch.full((2,), 1.5))


def test_an_optimizer_that_keeps_parameters_elsewhere_is_refused() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    check_repointable([torch.optim.SGD(parameters, lr=0.1)], "zero3")

    class Hoarder(torch.optim.SGD):
        def __init__(self) -> None:
            super().__init__(parameters, lr=0.1)
            self.slow = {"weights": [parameters]}

    with pytest.raises(TypeError, match="cannot split Hoarder: it keeps parameters in its attribute 'slow'"):
        check_repointable([Hoarder()], "zero3")

    class Wrapper:
        param_groups = [{"params": parameters}]  # noqa: RUF012

    with pytest.raises(TypeError, match=r"Wrapper is not a torch\.optim\.Optimizer"):
        check_repointable([Wrapper()], "zero1")  # type: ignore[list-item]
