"""`photinus export` writes a run's weights for other libraries, and `photinus.load(best=True)` finds the best ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

import photinus
from photinus.cli.main import main
from photinus.errors import CheckpointError
from photinus.trainer import CheckpointFolder
from tests.small_run import QUIET, Net, points, train
from tests.unit.test_dependencies import run_without


class Tied(nn.Module):
    """Two names for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose second epoch was its best one, with an average of the weights."""
    out = tmp_path_factory.mktemp("run")
    with photinus.init("gloo", "cpu", seed=1):
        plain = Net()
        average = AveragedModel(plain)
        model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        options: dict[str, Any] = {"save": photinus.Saving(best="-error"), "report": QUIET, "state": {"ema": average}}
        loop = photinus.Loop(model, optimizer, points(), batch_size=8, epochs=4, out=out, **options)
        for inputs, targets in loop:
            loop.backward(cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(plain)
            if loop.epoch_ended:
                loop.log(error=abs(loop.epoch - 2.0))
                torch.save([plain.state_dict(), average.module.state_dict()], out / f"epoch-{loop.epoch}.pt")
    return out


def export(*words: str | Path) -> int:
    return main(["export", *map(str, words)])


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("flags", "epoch", "which"), [([], 4, 0), (["--best"], 2, 0), (["--average", "ema"], 4, 1)], ids=str
)
def test_the_file_holds_the_plain_models_names_and_bits(
    tmp_path: Path, run: Path, flags: list[str], epoch: int, which: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.safetensors"
    assert export(run, "-o", path, *flags) == 0
    wanted = torch.load(run / f"epoch-{epoch}.pt")[which]
    assert equal(load_file(path), wanted)
    Net().load_state_dict(load_file(path))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}  # without it Transformers refuses the file
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path} (")
    assert line.endswith(f" 9 tensors from {run}/checkpoints/step-{epoch * 6:08d}")
    assert os.stat(path).st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def test_a_checkpoint_may_be_named_and_another_width_asked_for(tmp_path: Path, run: Path) -> None:
    checkpoint, path = run / "checkpoints" / "step-00000024", tmp_path / "model.safetensors"
    assert export(checkpoint, "--dtype", "bfloat16", "-o", path) == 0
    wanted = torch.load(run / "epoch-4.pt")[0]
    found = load_file(path)
    assert found["1.num_batches_tracked"].dtype is torch.int64
    assert found["0.weight"].dtype is torch.bfloat16
    assert equal(found, {n: v.bfloat16() if v.is_floating_point() else v for n, v in wanted.items()})


def test_load_finds_the_best_checkpoint_by_the_runs_own_metric(run: Path) -> None:
    model = Net()
    photinus.load(run, model=model, best=True)
    assert equal(model.state_dict(), torch.load(run / "epoch-2.pt")[0])


def save(folder: Path, **state: Any) -> Path:
    CheckpointFolder(folder / "checkpoints").save(1, state, description={})
    return folder


def test_tied_weights_are_written_once_by_their_first_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, other, path = Tied(), Tied(), tmp_path / "model.safetensors"
    assert export(save(tmp_path / "run", model=model), "-o", path) == 0
    assert capsys.readouterr().out.startswith("head.weight is tied to embedding.weight, which is written\n")
    assert "head.weight" not in load_file(path)
    load_model(other, path)
    assert torch.equal(other.head.weight, model.embedding.weight)
    assert other.load_state_dict(load_file(path), strict=False).missing_keys == ["head.weight"]


def test_views_of_one_tensor_are_written_whole_and_what_is_no_tensor_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = torch.arange(6.0).reshape(2, 3)
    weights = {"a": first, "flat": first.view(-1), "turned": first.T, "empty": torch.empty(0), "none": torch.empty(0)}
    path, extra = tmp_path / "model.safetensors", {"_extra_state": {"version": 3}}
    assert export(save(tmp_path / "run", model={**weights, **extra}), "-o", path) == 0
    assert equal(load_file(path), weights)
    line = "_extra_state is left out: a safetensors file holds plain tensors, and this is a dict\n"
    assert capsys.readouterr().out.startswith(line)


def test_what_cannot_be_exported_is_told_in_one_line_and_nothing_is_left(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.safetensors"
    (tmp_path / "there.safetensors").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "runs" / "one" / "checkpoints").mkdir(parents=True)
    large = save(tmp_path / "large", model={"weight": torch.tensor([1.0, -7e4])}, plain={"a": 1})
    before = sorted(tmp_path.iterdir())
    cases: list[tuple[list[Any], str]] = [
        ([run], "photinus export --out ?: needs the name of a file, like model.safetensors."),
        (["-o", path], "the following arguments are required: RUN"),
        ([run, "-o", tmp_path / "model.pt"], "model.pt: needs the name of a file, like model.safetensors."),
        ([run, "-o", tmp_path / "there.safetensors"], "that exists already; use another name, or remove it."),
        ([run, "-o", tmp_path / "no" / "x.safetensors"], f"there is no {tmp_path / 'no'}."),
        (
            [run, "-o", "/proc/model.safetensors"],
            "photinus export: /proc/model.safetensors could not be written: ",
        ),
        (
            [run, "-o", path, "--dtype", "float61"],
            "--dtype float61: needs float32, float16 or bfloat16. Did you mean float16",
        ),
        (
            [run, "-o", path, "--average", "emma"],
            "has no entry 'emma'; it has model, optimizer, ema, position, run, rng",
        ),
        ([large, "-o", path, "--average", "plain"], "'plain' in "),
        (
            [large, "-o", path, "--dtype", "float16"],
            "weight has values up to 7e+04, too large for float16: use --dtype bf",
        ),
        ([large, "-o", path, "--best"], "has no best checkpoint: its run needed save=photinus.Saving(best="),
        ([tmp_path / "nowhere", "-o", path], "there is no such folder."),
        ([tmp_path / "empty", "-o", path], "empty has no manifest"),
        (
            [tmp_path / "runs", "-o", path],
            f"runs is a folder of runs: name one of them, as in {tmp_path / 'runs' / 'one'}",
        ),
    ]
    for words, text in cases:
        assert export(*words) == 2, words
        shown = capsys.readouterr()
        assert text in shown.err, shown.err
        assert shown.err.count("\n") == 1
        assert shown.out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_a_best_checkpoint_of_a_run_without_a_metric_is_an_error_of_load_too(tmp_path: Path) -> None:
    train(tmp_path, epochs=1)
    with pytest.raises(CheckpointError, match=r"has no best checkpoint: its run needed save=photinus.Saving\(best="):
        photinus.load(tmp_path, best=True)


def test_a_full_disk_leaves_no_half_of_a_file(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(descriptor: int, data: bytes) -> int:
        if len(data) < 100:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[: len(data) // 2])

    real = os.write
    monkeypatch.setattr("photinus.trainer.checkpoint.durable.os.write", write)
    assert export(run, "-o", tmp_path / "model.safetensors") == 2
    monkeypatch.undo()
    assert "model.safetensors could not be written: [Errno 28] No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_the_line_names_it(tmp_path: Path, run: Path) -> None:
    words = ["export", str(run), "-o", str(tmp_path / "x.safetensors")]
    ended = run_without({"safetensors"}, f"from photinus.cli.main import main; sys.exit(main({words}))")
    assert ended.returncode == 2
    assert ended.stderr.startswith("photinus: photinus export needs safetensors, which ")


def test_types_of_8_bits_are_exported(tmp_path: Path) -> None:
    model = Net()
    model.register_buffer("scale", torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn))
    with photinus.init("gloo", "cpu", seed=1):
        model, optimizer = photinus.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loop = photinus.Loop(model, optimizer, points(), batch_size=8, epochs=1, out=tmp_path / "run", report=QUIET)
        for inputs, targets in loop:
            loop.backward(cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    assert export(tmp_path / "run", "-o", tmp_path / "a.safetensors") == 0
    assert load_file(tmp_path / "a.safetensors")["scale"].dtype == torch.float8_e4m3fn
    assert export(tmp_path / "run", "-o", tmp_path / "b.safetensors", "--dtype", "float16") == 0
    assert load_file(tmp_path / "b.safetensors")["scale"].tolist() == [0.5, 448.0]
