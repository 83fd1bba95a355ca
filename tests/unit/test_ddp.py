"""DistributedDataParallel in one process: refusals, a world of one, and what a module is expected to have."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from photinus.errors import NonFiniteGradientError, NotInitializedError
from photinus.parallel import DistributedDataParallel
from photinus.parallel.ddp.checks import device_to_move_to
from photinus.parallel.exchange.collectives import allocate
from photinus.parallel.exchange.tensors import dense_strides, map_tensors, tensors_in
from photinus.parallel.exchange.verify_models import describe


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_wrapping_without_a_process_group_says_what_to_do() -> None:
    with pytest.raises(NotInitializedError, match=r"photinus\.init"):
        DistributedDataParallel(nn.Linear(2, 2))


def test_a_model_on_the_cpu_is_moved_to_the_one_gpu_that_device_ids_names() -> None:
    model = nn.Linear(2, 2)
    assert device_to_move_to([1], model, gpus=2) == torch.device("cuda", 1)
    assert device_to_move_to(["cuda:1"], model, gpus=2) == torch.device("cuda", 1)
    for device_ids, gpus in ((None, 2), ([1], 0), ([0, 1], 2), (["cpu"], 2)):
        assert device_to_move_to(device_ids, model, gpus) is None
    assert device_to_move_to([1], nn.Linear(2, 2, device="meta"), gpus=2) is None  # it has a place


@pytest.mark.usefixtures("alone")
class TestRefusals:
    def test_model_without_parameters_that_require_grad(self) -> None:
        with pytest.raises(ValueError, match=r"ReLU has no parameter that requires grad \(0 parameters\)"):
            DistributedDataParallel(nn.ReLU())
        with pytest.raises(ValueError, match=r"Linear has no parameter that requires grad \(2 parameters\)"):
            DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))

    def test_a_type_in_which_gradients_cannot_travel_or_not_over_this_backend(self) -> None:
        with pytest.raises(ValueError, match=r"wire_dtype=torch\.int8: gradients can travel between hosts as"):
            DistributedDataParallel(nn.Linear(2, 2), wire_dtype=torch.int8)
        with pytest.raises(ValueError, match=r"backend photinus, and gloo exchanges .*bf16_compress_hook"):
            DistributedDataParallel(nn.Linear(2, 2), wire_dtype=torch.bfloat16)

    def test_more_than_one_device_id(self) -> None:
        with pytest.raises(ValueError, match=r"device_ids=\[0, 1\]: one process drives one device"):
            DistributedDataParallel(nn.Linear(2, 2), device_ids=[0, 1])

    def test_device_ids_for_a_model_on_the_cpu(self) -> None:
        with pytest.raises(ValueError, match="the model is on the CPU"):
            DistributedDataParallel(nn.Linear(2, 2), device_ids=[0])
        with pytest.raises(ValueError, match="output_device=0"):
            DistributedDataParallel(nn.Linear(2, 2), output_device=0)

    def test_device_ids_above_the_number_of_gpus(self) -> None:
        with pytest.raises(ValueError, match=r"device_ids=\[2\], but this process sees 2 GPUs"):
            device_to_move_to([2], nn.Linear(2, 2), gpus=2)

    def test_parameters_that_are_not_initialised(self) -> None:
        with pytest.raises(ValueError, match=r"1\.weight, 1\.bias are not initialised yet"):
            DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))

    def test_parameters_on_different_devices(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        with pytest.raises(ValueError, match=r"0\.weight on cpu, 1\.weight on meta"):
            DistributedDataParallel(model)

    def test_parameters_on_the_meta_device(self) -> None:
        with pytest.raises(ValueError, match="materialise"):
            DistributedDataParallel(nn.Linear(2, 2, device="meta"))

    def test_bucket_cap_without_room(self) -> None:
        with pytest.raises(ValueError, match="bucket_cap_mb=0"):
            DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=0)

    def test_something_that_is_no_module(self) -> None:
        with pytest.raises(TypeError, match="got function"):
            DistributedDataParallel(lambda x: x)  # type: ignore[arg-type]

    def test_attributes_of_the_wrapped_model_are_pointed_to(self) -> None:
        ddp = DistributedDataParallel(nn.Linear(2, 5))
        with pytest.raises(AttributeError, match=r"the wrapped Linear has: write \.module\.out_features"):
            ddp.out_features  # noqa: B018
        with pytest.raises(AttributeError, match="no_such_thing"):
            ddp.no_such_thing  # noqa: B018
        assert not hasattr(ddp, "out_features")


@pytest.mark.usefixtures("alone")
class TestWorldOfOne:
    def test_trains_like_the_plain_model(self) -> None:
        plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        ddp = DistributedDataParallel(copy.deepcopy(plain))
        for net in (plain, ddp):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for step in range(3):
                torch.manual_seed(step)
                optimizer.zero_grad()
                net(torch.randn(6, 3)).square().mean().backward()
                optimizer.step()
        for p, q in zip(plain.parameters(), ddp.module.parameters(), strict=True):
            assert torch.equal(p, q)

    def test_unused_parameters_are_nobody_elses_concern(self) -> None:
        ddp = DistributedDataParallel(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
        ddp.module[0](torch.ones(1, 2)).sum().backward()
        assert ddp.module[1].weight.grad is None

    def test_train_and_eval_reach_the_model(self) -> None:
        ddp = DistributedDataParallel(nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
        assert not ddp.eval().module[0].training
        assert ddp.train().module[0].training

    def test_keyword_inputs_and_nested_outputs_pass_through(self) -> None:
        class Model(nn.Linear):
            def forward(self, x: torch.Tensor, *, scale: float) -> dict[str, torch.Tensor]:
                return {"scaled": super().forward(x) * scale}

        ddp = DistributedDataParallel(Model(2, 2), find_unused_parameters=True)
        assert set(ddp(torch.ones(1, 2), scale=2.0)) == {"scaled"}

    def test_state_dict_has_the_prefix_and_the_module_plain_names(self) -> None:
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        assert list(ddp.state_dict()) == ["module.weight", "module.bias"]
        assert list(ddp.module.state_dict()) == ["weight", "bias"]
        ddp.load_state_dict({"module.weight": torch.ones(2, 2), "module.bias": torch.zeros(2)})
        assert torch.equal(ddp.module.weight, torch.ones(2, 2))

    def test_reducer_has_the_same_face(self) -> None:
        ddp = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
        assert ddp.reducer.plans == []
        ddp.reducer.filter_unused_parameters(ddp(torch.ones(1, 2)))
        ddp.reducer.prepare_for_backward([])
        with ddp.no_sync():
            ddp(torch.ones(1, 2)).sum().backward()
        ddp.reducer.stop()


def test_unpickling_without_a_process_group_says_what_to_do() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    text = pickle.dumps(DistributedDataParallel(nn.Linear(2, 2)))
    dist.destroy_process_group()
    with pytest.raises(NotInitializedError, match=r"photinus\.init"):
        pickle.loads(text)


def test_tensors_are_found_in_nested_values() -> None:
    from dataclasses import dataclass

    @dataclass
    class Output:
        loss: torch.Tensor
        rest: list[object]

    a, b, c = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
    assert tensors_in(Output(a, [{"x": (b, "text")}, None, {c}])) == [a, b, c]


def test_inputs_are_changed_in_place_of_nested_values_only() -> None:
    from collections import namedtuple

    Pair = namedtuple("Pair", ["first", "second"])
    changed = map_tensors(([torch.zeros(1), "a"], {"k": Pair(torch.zeros(1), 3)}), lambda t: t + 1)
    assert changed == ([torch.ones(1), "a"], {"k": Pair(torch.ones(1), 3)})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4),
        torch.zeros(3, 4).t(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(()),
        torch.zeros(1, 7, 1),
        torch.zeros(0, 3),
    ],
)
def test_dense_tensors_keep_their_strides(tensor: torch.Tensor) -> None:
    assert dense_strides(tensor) == tensor.stride()


@pytest.mark.parametrize("tensor", [torch.zeros(8, 3)[::2], torch.zeros(1, 3).expand(4, 3), torch.zeros(4, 6)[:, :3]])
def test_tensors_with_gaps_or_overlaps_get_contiguous_strides(tensor: torch.Tensor) -> None:
    assert dense_strides(tensor) == tensor.contiguous().stride()


def test_description_of_a_parameter_says_all_that_has_to_agree() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert describe("parameter", "a.b", parameter) == "parameter a.b: bfloat16 [2, 3], requires grad"
    assert describe("parameter", "a.b", parameter.requires_grad_(False)) == "parameter a.b: bfloat16 [2, 3], frozen"
    assert describe("buffer", "n", torch.tensor(1)) == "buffer n: int64 []"
    permuted = nn.Parameter(torch.zeros(2, 3).t())
    assert describe("parameter", "p", permuted) == "parameter p: float32 [3, 2], strides [1, 3], requires grad"


class OfferingGroup:
    """Offers memory that is not zero, as an arena's may be after use."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, torch.dtype]] = []

    def allocate_tensor(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        self.asked.append((size, dtype))
        return torch.full((size,), 7, dtype=dtype)


def test_memory_that_a_group_offers_is_taken_and_zeroed() -> None:
    group = OfferingGroup()
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.complex64):
        tensor = allocate(group, 5, dtype, torch.device("cpu"))  # type: ignore[arg-type]
        assert tensor.dtype == dtype
        assert tensor.shape == (5,)
        assert not tensor.any()
    assert group.asked == [(5, torch.float32), (5, torch.bfloat16), (5, torch.uint8), (10, torch.float32)]


def test_groups_without_memory_to_offer_and_other_devices_get_ordinary_memory() -> None:
    group = OfferingGroup()
    assert allocate(group, 3, torch.float32, torch.device("meta")).device.type == "meta"  # type: ignore[arg-type]
    assert allocate(object(), 3, torch.float32, torch.device("cpu")).tolist() == [0, 0, 0]  # type: ignore[arg-type]
    assert group.asked == []


@pytest.mark.usefixtures("alone")
def test_one_process_has_the_nan_guard_as_well() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2), nan_guard=True)
    ddp(torch.ones(1, 2)).sum().backward()
    with pytest.raises(NonFiniteGradientError, match=r"rank 0 made .* parameter (weight|bias)"):
        (ddp(torch.ones(1, 2)).sum() * float("nan")).backward()
