"""`photinus.predict`: the outputs of one process, in the order of the data set, at every number of ranks."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import photinus
from tests.ranks import run_ranks, values
from tests.small_run import Net, points

SAMPLES = 101  # a prime: no world size splits it


def both(model: nn.Module, batch: Any) -> dict[str, Any]:
    outputs = model(batch[0])
    return {"outputs": outputs, "more": (batch[1], outputs.argmax(1))}


def _half(model: nn.Module, batch: Any) -> Tensor:
    outputs: Tensor = model(batch[0])
    return outputs.bfloat16()


def _bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape), value.numpy().tobytes().hex()]
    if isinstance(value, dict):
        return {name: _bits(each) for name, each in value.items()}
    return [_bits(each) for each in value] if isinstance(value, (list, tuple)) else value


def predictions(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    found: dict[str, Any] = {}
    for strategy in ("ddp", "zero3"):
        torch.manual_seed(3)
        model = Net()
        model, _ = photinus.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
        for size in (4, 16, 64):
            found[f"{strategy} {size}"] = photinus.predict(model, points(SAMPLES), batch_size=size)
        found[f"{strategy} few"] = photinus.predict(model, points(2))
        assert model.training
    found["everywhere"] = photinus.predict(model, points(SAMPLES), batch_size=8, on_all_ranks=True)
    found["structure"] = photinus.predict(model, DataLoader(points(SAMPLES), batch_size=8, shuffle=True), forward=both)
    assert found["structure"] is None or isinstance(found["structure"]["more"], tuple)
    found["inputs alone"] = photinus.predict(model, TensorDataset(points(SAMPLES).tensors[0]), batch_size=8)
    photinus.predict(model, points(SAMPLES), batch_size=8, out=folder / "new" / "outputs.npy")
    photinus.predict(model, points(SAMPLES), batch_size=8, forward=_half, out=folder / "b.npy")
    return {name: _bits(value) for name, value in found.items()}


def refused(rank: int, folder: Path) -> dict[str, str]:
    """Errors on one rank alone; afterwards the ranks still work together."""
    model = photinus.wrap(Net())

    def failing(at: int) -> Any:
        def forward(model: nn.Module, batch: Any) -> Tensor:
            if rank == at:
                raise ZeroDivisionError("in the model")
            return model(batch[0])

        return forward

    local = namedtuple("local", "outputs")
    (folder / "kept.npy").write_text("kept")
    cases: dict[str, dict[str, Any]] = {
        "rank 1": {"forward": failing(1), "out": folder / "kept.npy"},
        "rank 0": {"forward": failing(0), "out": folder / "kept.npy"},
        "length": {"dataset": points(40 + rank)},
        "shape": {"forward": lambda model, batch: model(batch[0]).sum()},
        "kind": {"forward": lambda model, batch: "text"},
        "rows": {"out": folder / "kept.npy", "forward": lambda model, batch: torch.ones(len(batch[0]), len(batch[0]))},
        "dicts": {"out": folder / "kept.npy", "forward": both},
        "structures": {"forward": lambda model, batch: dict.fromkeys("ab"[: len(batch[0])], batch[0])},
        "folder": {"out": folder},
        "both": {"out": folder / "x.npy", "on_all_ranks": True},
        "empty": {"dataset": TensorDataset(torch.zeros(0, 2))},
        # Rank 0 alone has outputs, of a class that another process cannot look up.
        "no pickle": {"dataset": points(8), "forward": lambda model, batch: local(batch[0])},
        # Rank 0 alone unpickles, and PyTorch cannot.
        "no unpickle": {"forward": lambda model, batch: batch[0].to(torch.float8_e4m3fn)},
    }
    found = {}
    for name, options in cases.items():
        try:
            photinus.predict(model, **{"dataset": points(41), "batch_size": 8, **options})
            found[name] = "nothing"
        except Exception as error:  # noqa: BLE001 - its text is looked at
            found[name] = f"{type(error).__name__}: {error}"
    found["after"] = str(photinus.predict(model, points(5)) is not None)
    return found


def on_ranks(rank: int, world_size: int, folder: str) -> list[Any]:
    with photinus.init("auto", "cpu"):
        return [predictions(Path(folder)), refused(rank, Path(folder))]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.timeout(240)
def test_predictions_have_the_bits_and_the_order_of_one_process(tmp_path: Path, world_size: int) -> None:
    alone, shared = (tmp_path / name for name in ("alone", "shared"))
    for folder in (alone, shared):
        folder.mkdir()
    with photinus.init("gloo", "cpu"):
        one = predictions(alone)
    assert one["ddp 4"][1] == one["zero3 4"][1] == [SAMPLES, 3]
    labels = torch.tensor([int(label) for _, label in points(SAMPLES)])
    assert one["structure"]["more"][0] == _bits(labels)
    ranks = values(
        run_ranks(
            "tests.dist.test_predict:on_ranks",
            world_size=world_size,
            backend="photinus",
            timeout_s=200,
            arguments={"folder": str(shared)},
        )
    )
    assert ranks[0][0] == one
    for found, _ in ranks[1:]:
        assert found.pop("everywhere") == one["everywhere"]
        assert set(found.values()) == {None}
    for name in ("new/outputs.npy", "b.npy"):
        assert (shared / name).read_bytes() == (alone / name).read_bytes()
    loaded = np.load(shared / "new" / "outputs.npy", mmap_mode="r")
    assert _bits(torch.from_numpy(np.array(loaded))) == one["everywhere"]
    assert np.load(shared / "b.npy").dtype == np.float32
    for rank, (_, errors) in enumerate(ranks):
        assert ("in the model" if rank == 1 else "failed on rank 1 (") in errors["rank 1"]
        assert ("in the model" if rank == 0 else "failed on rank 0 (") in errors["rank 0"]
        for name, text in {
            "length": "different predictions: samples=40 on rank 0, 41 on rank 1",
            "shape": "one row per sample",
            "kind": "a str, but a tensor",
            "rows": "blocks do not fit together: rows of shape",
            "dicts": "outputs of one tensor",
            "structures": "blocks do not fit together: a dict of a, and a dict of a, b. Give forward",
            "folder": "is a folder",
            "both": "exclude each other",
            "empty": "is empty",
            "no pickle": "local",
            "no unpickle": "UntypedStorage",
        }.items():
            assert text in errors[name], (rank, name)
        assert errors["after"] == str(rank == 0)
    assert (shared / "kept.npy").read_text() == "kept"
    assert not [*shared.glob(".tmp*")]


@pytest.mark.parametrize(
    "forward",
    [
        lambda model, batch: model(batch[0]).repeat(2, 1),
        lambda model, batch: model(batch[0])[1:],
        lambda model, batch: {"right": batch[0], "wrong": model(batch[0]).T},
        lambda model, batch: (batch[0], [model(batch[0])[:1]]),
    ],
)
def test_outputs_with_another_number_of_rows_than_samples_are_refused(forward: Any) -> None:
    with photinus.init("gloo", "cpu"):
        with pytest.raises(ValueError, match=r"for 8 samples, but one row per sample is needed, \[8, \.\.\.\]"):
            photinus.predict(Net(), points(16), batch_size=8, forward=forward)


class _Reusing(nn.Module):
    """Writes every output to the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(8, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        memory: Any = self.memory
        outputs: Tensor = memory[: len(inputs)]
        return outputs.copy_(inputs[:, :2])


def test_outputs_that_a_later_forward_overwrites_are_copied() -> None:
    with photinus.init("gloo", "cpu"):
        found = photinus.predict(_Reusing(), points(20), batch_size=8)
    assert torch.equal(found, points(20).tensors[0][:, :2])


def test_lazily_conjugated_outputs_are_written_as_they_are(tmp_path: Path) -> None:
    def conjugated(model: nn.Module, batch: Any) -> Tensor:
        return torch.complex(batch[0], batch[0]).conj()

    with photinus.init("gloo", "cpu"):
        photinus.predict(Net(), points(20), batch_size=8, forward=conjugated, out=tmp_path / "out.npy")
    inputs = points(20).tensors[0].numpy()
    assert np.array_equal(np.load(tmp_path / "out.npy"), inputs - 1j * inputs)


def test_outputs_whose_type_numpy_lacks_are_written_as_float32(tmp_path: Path) -> None:
    def narrow(model: nn.Module, batch: Any) -> Tensor:
        narrowed: Tensor = batch[0].to(torch.float8_e4m3fn)
        return narrowed

    with photinus.init("gloo", "cpu"):
        photinus.predict(Net(), points(20), batch_size=8, forward=narrow, out=tmp_path / "out.npy")
        found = photinus.predict(Net(), points(20), batch_size=8, forward=narrow)
    written = np.load(tmp_path / "out.npy")
    assert written.dtype == np.float32
    assert torch.equal(torch.from_numpy(written), found.float())


@pytest.mark.parametrize("out", [None, "out.npy"])
def test_outputs_of_different_types_are_refused(tmp_path: Path, out: str | None) -> None:
    blocks = iter((torch.float32, torch.float64))
    with photinus.init("gloo", "cpu"):
        with pytest.raises(ValueError, match=r"fit together: rows of shape \[\] and type float32, and .* type float64"):
            photinus.predict(
                Net(),
                points(16),
                batch_size=8,
                forward=lambda _, batch: torch.ones(8, dtype=next(blocks)),
                out=out and tmp_path / out,
            )
