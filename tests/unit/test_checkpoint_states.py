"""From objects to plain states and back, all or none; and the single file of photinus.save."""

from __future__ import annotations

import collections
import enum
import io
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from photinus.errors import CheckpointError
from photinus.trainer.checkpoint.folder import CheckpointFolder
from photinus.trainer.checkpoint.statefile import load, save
from photinus.trainer.checkpoint.states import PlainState, state_of, unwrap


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


class Wrapper(nn.Module):
    """As DistributedDataParallel classes are: the model is their child `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def no_sync(self) -> None: ...


class Shell(nn.Module):
    """A model of the user's own whose only child is called `module`, as averages of weights often are."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__()
        self.module = nn.Linear(3, 2) if module is None else module


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def round_trip(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(PlainState(value, "value").value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_plain_values_come_back_as_they_were() -> None:
    value = {
        "numbers": [1, 2.5, True, None, 3 + 4j, 2**80, float("inf")],
        "text": ("a", b"b"),
        ("tuple", 1): {1, 2},
        3: torch.arange(5, dtype=torch.int16),
        "ordered": collections.OrderedDict(a=1),
        "counter": collections.Counter("hello"),
        "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
        "bfloat16": torch.randn(3, dtype=torch.bfloat16),
        "empty": [{}, [], (), torch.empty(0), torch.tensor(3.0)],
    }
    assert equal(round_trip(value), value)


def test_subclasses_of_numbers_and_text_become_plain() -> None:
    value = {"a": np.float64(1.5), "b": np.int64(3), "c": np.bool_(True), "d": torch.__version__, "e": np.float32(0.5)}
    assert round_trip(value) == {"a": 1.5, "b": 3, "c": True, "d": str(torch.__version__), "e": 0.5}
    assert all(type(item) in (int, float, bool, str) for item in round_trip(value).values())
    assert round_trip(collections.defaultdict(list, a=[1])) == {"a": [1]}


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: 1, r"function.*cannot be saved"),
        (np.zeros(3), r"numpy.ndarray.*torch.from_numpy"),
        (Colour.RED, "Colour"),
        (Point(1, 2), "Point"),
        (random.Random(1), "random.Random"),
        (torch.empty(3, device="meta"), "on the meta device"),
        (nn.parameter.UninitializedParameter(), "UninitializedParameter|lazy"),
        (frozenset((1,)), "frozenset"),
        ({torch.zeros(1): 1}, "tensor as a key"),
    ],
)
def test_what_could_not_be_read_back_is_refused_by_its_place(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said) as caught:
        PlainState({"inner": [0, value]}, "scheduler")
    assert str(caught.value).startswith("scheduler['inner'][1]")


def test_a_view_is_saved_without_the_buffer_it_looks_at() -> None:
    """Gradients and parameters may live in large shared buffers."""
    buffer = torch.arange(100_000, dtype=torch.float32)
    value = {"view": buffer[10:20], "transposed": buffer[:6].reshape(2, 3).t(), "expanded": buffer[3].expand(2, 2)}
    file = io.BytesIO()
    torch.save(PlainState(value, "value").value, file)
    assert file.tell() < 5_000
    loaded = round_trip(value)
    assert equal(loaded, {name: tensor.clone() for name, tensor in value.items()})


def test_one_tensor_under_two_names_stays_one() -> None:
    tied = nn.Parameter(torch.randn(4))
    loaded = round_trip({"a": tied, "b": tied, "other": torch.randn(4)})
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr() != loaded["other"].data_ptr()
    assert not loaded["a"].requires_grad


@pytest.mark.parametrize(
    "value", [b"", b"a", b"\xff" * 300, "", 1j, torch.Size([2]), torch.bfloat16, 2**1000, (), set()]
)
def test_a_value_that_can_be_saved_can_be_loaded(tmp_path: Path, value: Any) -> None:
    save(tmp_path / "x.pt", value=value)
    assert load(tmp_path / "x.pt")["value"] == value


def test_the_bytes_needed_are_not_underestimated() -> None:
    model = Net(64)
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    for value in (model.state_dict(), optimizer.state_dict(), {"text": "é" * 5000, "many": list(range(3000))}, None):
        plain = PlainState(value, "value")
        file = io.BytesIO()
        torch.save(plain.value, file)
        assert file.tell() <= plain.needed_bytes < 2 * file.tell() + 300_000


def test_the_models_own_version_marks_are_kept() -> None:
    loaded = round_trip(Net().state_dict())
    assert loaded._metadata["body.1"] == {"version": 2}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        Wrapper,
        nn.DataParallel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: Wrapper(torch.compile(model, backend="eager")),
        lambda model: torch.compile(Wrapper(model), backend="eager"),
    ],
    ids=["plain", "ddp", "dp", "compiled", "ddp of compiled", "compiled ddp"],
)
def test_names_in_the_file_are_the_users_own_whatever_wraps_the_model(tmp_path: Path, wrap: Any) -> None:
    model = Net()
    save(tmp_path / "m.pt", model=wrap(model))
    in_file = torch.load(tmp_path / "m.pt", weights_only=True)["model"]
    assert list(in_file) == list(model.state_dict())
    Net().load_state_dict(in_file)
    other = Net()
    load(tmp_path / "m.pt", model=wrap(other))
    assert equal(dict(other.state_dict()), dict(model.state_dict()))


def test_a_users_model_that_is_called_module_is_no_wrapper() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    holder = Holder()
    assert unwrap(holder) is holder
    assert list(state_of(holder)) == ["module.weight", "module.bias"]


def test_all_is_saved_and_loaded_and_values_are_returned(tmp_path: Path) -> None:
    model, other = Net(), Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other_optimizer, 2)
    trained(model, optimizer)
    scheduler.step()
    path = tmp_path / "new" / "folder" / "last.pt"
    save(path, model=model, optimizer=optimizer, scheduler=scheduler, epoch=3, extra={"loss": [0.5]})
    saved = load(path, model=other, optimizer=other_optimizer, scheduler=other_scheduler)
    assert saved == {"epoch": 3, "extra": {"loss": [0.5]}}
    trained(model, optimizer, seed=1)
    trained(other, other_optimizer, seed=1)
    assert equal(dict(model.state_dict()), dict(other.state_dict()))
    assert other_scheduler.last_epoch == 1
    assert os.listdir(path.parent) == ["last.pt"]
    assert list(load(path)) == ["model", "optimizer", "scheduler", "epoch", "extra"]


class Stubborn:
    """Takes no state but perhaps its own."""

    def __init__(self, own: int = 1, *, always: bool = False) -> None:
        self.own, self.always = own, always

    def state_dict(self) -> dict[str, int]:
        return {"a": self.own}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.always or state["a"] != self.own:
            raise RuntimeError("I do not want it")


def test_when_one_object_fails_none_is_changed(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    save(tmp_path / "x.pt", model=model, optimizer=optimizer, stubborn=Stubborn())
    other = Net()
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.7)
    trained(other, other_optimizer, seed=5)
    before = PlainState([other.state_dict(), other_optimizer.state_dict()], "before").value
    before = round_trip(before)
    with pytest.raises(CheckpointError, match=r"stubborn .*RuntimeError: I do not want it. Nothing was changed"):
        load(tmp_path / "x.pt", model=other, optimizer=other_optimizer, stubborn=Stubborn(2))
    with pytest.raises(CheckpointError, match=r"could not be put back in stubborn .*I do not want it.; all else was"):
        load(tmp_path / "x.pt", model=other, stubborn=Stubborn(2, always=True), optimizer=other_optimizer)
    with pytest.raises(CheckpointError, match=r"optimizer .* does not take its state"):
        load(tmp_path / "x.pt", model=other, optimizer=torch.optim.Adam(other.body.parameters()))
    after = round_trip([other.state_dict(), other_optimizer.state_dict()])
    assert equal(after, before)


def test_another_model_is_told_apart_by_names_and_shapes(tmp_path: Path) -> None:
    save(tmp_path / "x.pt", model=Net(4), epoch=1)
    with pytest.raises(CheckpointError, match=r"body\.0\.weight has shape \[4, 3\] and the model's \[8, 3\]"):
        load(tmp_path / "x.pt", model=Net(8))
    with pytest.raises(CheckpointError, match=r"it lacks weight, bias; the model has no body\.0\.weight"):
        load(tmp_path / "x.pt", model=nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="holds no 'optimizer'; it holds 'model', 'epoch'"):
        load(tmp_path / "x.pt", optimizer=torch.optim.SGD(Net().parameters()))
    with pytest.raises(TypeError, match=r"epoch is a int without load_state_dict.*epoch = saved\['epoch'\]"):
        load(tmp_path / "x.pt", epoch=0)
    with pytest.raises(CheckpointError, match=r"epoch in .* is a int, not the state of a model"):
        load(tmp_path / "x.pt", epoch=Net())


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad", "RMSprop", "Adadelta"])
def test_an_optimizer_state_of_another_shape_names_the_parameter_and_both_shapes(tmp_path: Path, kind: str) -> None:
    def trained(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, width))
        options = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model, optimizer

    save(tmp_path / "x.pt", optimizer=trained(8)[1])
    model, optimizer = trained(2)
    load(tmp_path / "x.pt", optimizer=trained(8)[1])
    for objects, name in (({"model": model}, r"1\.weight"), ({}, "parameter 2 of group 0")):
        save(tmp_path / "y.pt", optimizer=trained(8)[1], model=model)
        with pytest.raises(
            CheckpointError, match=rf"{name} has shape \[8, 3\] and the parameter \[2, 3\]\. .*Nothing was"
        ):
            load(tmp_path / "y.pt", optimizer=optimizer, **objects)


def test_a_runs_folder_or_a_checkpoint_is_loaded_too(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints", keep_last=4, best="accuracy")
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.7)):
        folder.save(step, {"model": {"w": torch.tensor([float(step)])}, "n": step}, description={}, metric=accuracy)

    def loaded(*place: str, **choice: Any) -> list[float]:
        model = nn.ParameterDict({"w": torch.zeros(1)})
        rest = load(tmp_path.joinpath("run", *place), model=model, **choice)
        return [model["w"].item(), rest["n"]]

    assert loaded() == loaded("checkpoints") == loaded("checkpoints", "step-00000030") == [30, 30]
    assert loaded(best="accuracy") == [20, 20]
    assert loaded(best="-accuracy") == loaded(step=10) == [10, 10]
    with pytest.raises(CheckpointError, match=r"holds no checkpoint of step 11; it holds step-00000010, step-0"):
        loaded(step=11)
    with pytest.raises(CheckpointError, match=r"no checkpoint with a metric 'loss'"):
        loaded(best="loss")
    save(tmp_path / "x.pt", n=3, best=nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"choose of a run's folder, but .*x\.pt is a file"):
        load(tmp_path / "x.pt", step=3)
    assert load(tmp_path / "x.pt", best=nn.Linear(1, 1)) == {"n": 3}  # an object of this name


def test_a_file_of_the_old_template_loads_with_its_prefix(tmp_path: Path) -> None:
    model = Net()
    prefixed = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": prefixed, "global_step": 7}, tmp_path / "old.pt")
    other = Net()
    assert load(tmp_path / "old.pt", model=other) == {"global_step": 7}
    assert equal(dict(other.state_dict()), dict(model.state_dict()))
    torch.save({"a": torch.ones(3)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    assert equal(load(tmp_path / "legacy.pt"), {"a": torch.ones(3)})


def test_a_damaged_file_of_torchs_own_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"weight": torch.arange(4000.0)}, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert torch.load(path)["weight"].shape == (4000,)  # torch itself does not notice
    with pytest.raises(CheckpointError, match="damaged: checksum of its record"):
        load(path)


def test_no_code_from_a_file_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "the code has run"

    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(marker),)

    torch.save({"model": Payload()}, tmp_path / "evil.pt")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"model": Payload()}, protocol=2))
    for name in ("evil.pt", "pickle.pt"):
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            load(tmp_path / name)
    assert not marker.exists()


def test_the_file_is_an_ordinary_archive_that_plain_torch_maps(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    save(path, weight=torch.arange(10.0))
    assert torch.equal(torch.load(path, weights_only=True, mmap=True)["weight"], torch.arange(10.0))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    save(path, epoch=1)
    with pytest.raises(TypeError, match="scheduler"):
        save(path, epoch=2, state={"scheduler": lambda: 1})
    with pytest.raises(ValueError, match="nothing to save"):
        save(path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path / "folder", epoch=2)
    with pytest.raises(CheckpointError, match=r"folder has no manifest\.json"):
        load(tmp_path / "folder")
    with pytest.raises(CheckpointError, match=r"there is no file .*nothing\.pt"):
        load(tmp_path / "nothing.pt")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list, not a dict"):
        load(tmp_path / "list.pt")
    assert load(path) == {"epoch": 1}
    assert sorted(os.listdir(tmp_path)) == ["folder", "list.pt", "x.pt"]


def test_an_unfinished_file_of_a_dead_writer_is_removed_at_the_next_save(tmp_path: Path) -> None:
    (tmp_path / ".tmp-x.pt-deadbeef").write_bytes(b"half")
    (tmp_path / ".tmp-y.pt-deadbeef").write_bytes(b"another's")
    save(tmp_path / "x.pt", epoch=1)
    assert sorted(os.listdir(tmp_path)) == [".tmp-y.pt-deadbeef", "x.pt"]


@pytest.mark.parametrize("wrapped", [Shell, lambda: Wrapper(Shell()), lambda: Shell(Shell())])
def test_a_model_whose_only_child_is_called_module_gets_its_state_back(tmp_path: Path, wrapped: Any) -> None:
    before, after = wrapped(), wrapped()
    save(tmp_path / "state.pt", model=before)
    load(tmp_path / "state.pt", model=after)
    assert equal(after.state_dict(), before.state_dict())


def test_a_prefix_of_a_wrapper_comes_off_before_names_that_begin_with_module(tmp_path: Path) -> None:
    before, after = Wrapper(Shell()), Shell()
    torch.save({"model": before.state_dict()}, tmp_path / "state.pt")
    load(tmp_path / "state.pt", model=after)
    assert equal(after.module.state_dict(), unwrap(before).module.state_dict())  # type: ignore[union-attr]


def test_a_link_to_the_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "latest.pt").symlink_to(tmp_path / "disk" / "a.pt")
    for step in (1, 2):
        save(tmp_path / "latest.pt", step=step)
    assert (tmp_path / "latest.pt").is_symlink()
    assert load(tmp_path / "disk" / "a.pt") == {"step": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "latest.pt"]
