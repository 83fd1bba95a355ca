"""Flipped bits, cut-off files and full disks: refused, told, and survived."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import photinus
from photinus.errors import CheckpointError, HostError
from photinus.runlog.tables import read_rows
from photinus.trainer.checkpoint import manifest
from photinus.trainer.checkpoint.folder import CheckpointFolder, find_checkpoint
from photinus.trainer.checkpoint.statefile import load, save
from tests.small_run import CutOffError, train
from tests.unit.test_trackers import needs, run_script


def state(step: int, elems: int = 300) -> dict[str, Any]:
    return {"model": {"weight": torch.full((elems,), float(step))}, "optimizer": {"lr": 0.1, "step": step}}


def only_the_first_is_good(folder: CheckpointFolder, damaged: Path, what: str) -> None:
    with pytest.raises(CheckpointError, match=r"damaged|missing|holds step|has no manifest"):
        find_checkpoint(damaged.parent)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = folder.newest()
    assert found is not None, what
    assert found.step == 1, what
    assert damaged.name in str(told[0].message), what


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[key], value) for key, value in wanted.items())
    return type(found) is type(wanted) and found == wanted


def test_every_flipped_bit_is_refused_or_changes_no_value(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, state(step), description={"accuracy": 1e-05, "names": ["a b"]}, metric=step)
    files = sorted((tmp_path / "step-00000002").iterdir())
    assert [path.name for path in files] == ["manifest.json", "model.pt", "optimizer.pt"]
    draw = random.Random(7)
    for path in files:
        good = path.read_bytes()
        bits, harmless = draw.sample(range(8 * len(good)), 350), 0
        for bit in bits:
            data = bytearray(good)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            try:
                found = find_checkpoint(path.parent)
            except CheckpointError:
                only_the_first_is_good(folder, path, f"bit {bit} of {path.name}")
            else:  # in what fills a gap
                assert same(found.load(), state(2)), f"bit {bit} of {path.name}"
                harmless += 1
        assert harmless < (0.6 * len(bits) if path.suffix == ".pt" else 1)
        path.write_bytes(good)
        found = folder.newest()
        assert found is not None
        assert found.step == 2


def test_every_truncation_and_every_longer_file_is_refused(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, state(step), description={})
    draw = random.Random(3)
    for path in sorted((tmp_path / "step-00000002").iterdir()):
        good = path.read_bytes()
        for length in [0, len(good) - 1, *draw.sample(range(len(good)), 65)]:
            path.write_bytes(good[:length])
            only_the_first_is_good(folder, path, f"{length} bytes of {path.name}")
        path.write_bytes(good + b"\0")
        only_the_first_is_good(folder, path, f"one byte more in {path.name}")
        path.unlink()
        only_the_first_is_good(folder, path, f"without {path.name}")
        path.write_bytes(good)


def test_files_of_two_checkpoints_mixed_are_refused(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, state(step), description={})
    for name in ("model.pt", "optimizer.pt", "manifest.json"):
        path = tmp_path / "step-00000002" / name
        good = path.read_bytes()
        shutil.copy(tmp_path / "step-00000001" / name, path)
        with pytest.raises(CheckpointError, match=r"damaged: checksum of its directory expected|holds step 1"):
            find_checkpoint(path.parent)
        path.write_bytes(good)


def test_a_bit_flipped_in_each_byte_of_a_state_file_is_found_or_changes_no_value(tmp_path: Path) -> None:
    """A file of `photinus.save` has no manifest: its own checksums are all that there is."""
    path, wanted = tmp_path / "x.pt", {"epoch": 3, **state(2)["model"], "name": "ab", "more": [1.5, None]}
    save(path, **wanted)
    good, draw, found = path.read_bytes(), random.Random(5), 0
    # And every bit of the directory at the end.
    bits = [8 * at + draw.randrange(8) for at in range(len(good) - 200)] + [
        *range(8 * (len(good) - 200), 8 * len(good))
    ]
    for bit in bits:
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            loaded = load(path)
        except CheckpointError:
            found += 1
        else:
            assert same(loaded, wanted), f"bit {bit} of {8 * len(good)}"
    assert found > 0.4 * len(bits)
    for length in [0, 1, len(good) - 1, *draw.sample(range(len(good)), 60)]:
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError):
            load(path)


def test_files_and_checkpoints_of_version_0_2_are_read_and_verified(tmp_path: Path) -> None:
    """They have a digest of other bytes: in the archive's comment, and in the manifest."""
    path = tmp_path / "x.pt"
    save(path, **state(1))
    good = path.read_bytes()
    old = good[:-2] + struct.pack("<H", 40) + b"photinus crc32 of 16 MiB blocks 01234567"
    path.write_bytes(old)
    assert same(load(path), state(1))
    path.write_bytes(old.replace(struct.pack("<3f", 1, 1, 1), struct.pack("<3f", 1, 2, 1), 1))
    with pytest.raises(CheckpointError, match=r"x\.pt is damaged: checksum of its record"):
        load(path)

    checkpoint = CheckpointFolder(tmp_path).save(1, state(1), description={})
    head = (checkpoint / "manifest.json").read_bytes().rpartition(b",\n")[0]
    told = json.loads(head + b"}")
    files = {entry: {**record, "digest": "0123abcd"} for entry, record in told["files"].items()}
    head = json.dumps({**told, "format": 2, "files": files}, indent=1).removesuffix("\n}").encode()
    (checkpoint / "manifest.json").write_bytes(head + manifest._seal(head))
    found = find_checkpoint(tmp_path)
    assert same(found.load(), state(1))
    data = (checkpoint / "model.pt").read_bytes()
    (checkpoint / "model.pt").write_bytes(data.replace(struct.pack("<2f", 1, 1), struct.pack("<2f", 2, 1), 1))
    with pytest.raises(CheckpointError, match=r"model\.pt is damaged: checksum of its record"):
        find_checkpoint(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"photinus-test", str(folder).encode(), b"tmpfs", 0, b"size=4m") != 0:
        pytest.skip(f"mounting a small file system needs root: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        if libc.umount2(str(folder).encode(), 2) != 0:  # MNT_DETACH
            warnings.warn(f"{folder} could not be unmounted: {os.strerror(ctypes.get_errno())}", stacklevel=1)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_disk_too_small_is_told_before_anything_is_written(small_disk: Path) -> None:
    folder = CheckpointFolder(small_disk)
    folder.save(1, state(1), description={})
    save(small_disk / "x.pt", epoch=1)
    before = names(small_disk)
    wanted = r"no space left for a checkpoint in .*/disk: it needs 8\d{6} bytes \(.* MiB\) and \d+ \(.* MiB\) are free"
    with pytest.raises(CheckpointError, match=wanted):
        folder.save(2, state(2, elems=2_000_000), description={})
    with pytest.raises(CheckpointError, match=wanted):
        save(small_disk / "x.pt", weight=torch.ones(2_000_000))
    assert names(small_disk) == before
    found = folder.newest()
    assert found is not None
    assert found.step == 1
    assert load(small_disk / "x.pt") == {"epoch": 1}


def test_a_disk_that_fills_up_while_writing_loses_nothing(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may take the space between the look and the write; and a quota is not seen by looking."""
    folder = CheckpointFolder(small_disk)
    folder.save(1, state(1), description={})
    save(small_disk / "x.pt", epoch=1)
    before = names(small_disk)
    for module in ("folder", "statefile"):
        monkeypatch.setattr(f"photinus.trainer.checkpoint.{module}.require_space", lambda *arguments: None)
    for elems in (1_100_000, 2_000_000):
        with pytest.raises(CheckpointError, match=r"no space left .* it needs \d+ bytes .* are free") as caught:
            folder.save(2, state(2, elems=elems), description={})
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(CheckpointError, match="no space left"):
            save(small_disk / "x.pt", weight=torch.ones(elems))
    assert names(small_disk) == before
    monkeypatch.undo()
    found = folder.newest()
    assert found is not None
    assert found.step == 1
    assert load(small_disk / "x.pt") == {"epoch": 1}
    folder.save(2, state(2), description={})  # and the folder is as usable as before
    assert torch.equal(
        find_checkpoint(Path(small_disk) / "step-00000002").load()["model"]["weight"], torch.full((300,), 2.0)
    )


def test_retention_waits_for_the_new_one_even_when_space_is_short(small_disk: Path) -> None:
    """Room for two and a half: the third is refused although deleting the first would make room for it."""
    folder = CheckpointFolder(small_disk, keep_last=1)
    folder.save(1, state(1, elems=500_000), description={})
    folder.save(2, state(2, elems=400_000), description={})
    assert names(small_disk) == [".writer.lock", "step-00000002"]
    with pytest.raises(CheckpointError, match="no space left"):
        folder.save(3, state(3, elems=700_000), description={})
    found = folder.newest()
    assert found is not None
    assert found.step == 2


def make_read_only(disk: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    read_only, remount = 1, 32
    if libc.mount(b"photinus-test", str(disk).encode(), b"tmpfs", read_only | remount, b"size=4m") != 0:
        pytest.skip(f"cannot make it read-only: {os.strerror(ctypes.get_errno())}")


def test_a_folder_that_cannot_be_written_is_named(small_disk: Path) -> None:
    folder = CheckpointFolder(small_disk / "run")
    folder.save(1, state(1), description={})
    make_read_only(small_disk)
    with pytest.raises(CheckpointError, match=r"step 2 could not be saved in .*Read-only file system.*untouched"):
        folder.save(2, state(2), description={})
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save(small_disk / "x.pt", epoch=1)
    found = folder.newest()  # reading needs no lock and no permission to write
    assert found is not None
    assert found.step == 1


def test_a_loop_that_cannot_write_into_its_folder_says_so_before_it_trains(small_disk: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.zeros(4, 2))
    (small_disk / "there").mkdir()
    make_read_only(small_disk)
    for name in ("there", "new"):
        text = rf"rank 0 cannot write into .*{name} on host .*Read-only file system.*Give a folder that it can write"
        with photinus.init("gloo", "cpu"), pytest.raises(HostError, match=text):
            photinus.Loop(model, optimizer, data, batch_size=2, epochs=1, out=small_disk / name)


def test_a_loop_on_a_full_disk_says_so_before_it_trains(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(small_disk).free // 4096 * 4096))
    out = small_disk / "deep" / "run"
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(torch.ones(100), torch.ones(100))] * 8
    with (
        photinus.init(device="cpu"),
        pytest.raises(CheckpointError, match=r"no space left for a checkpoint in .*/run: it needs 40400 bytes .* free"),
    ):
        photinus.Loop(model, optimizer, data, batch_size=4, epochs=1, out=out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "logger", ["TensorBoard()", 'Wandb(mode="offline")', "MLflow()"], ids=lambda text: text.split("(")[0]
)
def test_a_full_disk_costs_the_logger_and_the_weights_are_the_same(
    tmp_path: Path, small_disk: Path, logger: str
) -> None:
    name = logger.split("(")[0].lower()
    needs(name)
    out = tmp_path / "run"
    out.mkdir()
    (small_disk / "logs").mkdir()
    (out / name).symlink_to(small_disk / "logs")
    (small_disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(small_disk).free // 4096 * 4096))
    dropped, done = run_script(out, f"[photinus.{logger}]")
    assert name == "wandb" or len(dropped) == 1  # W&B writes in a process of its own
    assert ([], done) == run_script(tmp_path / "plain", "[]")


def test_a_run_goes_on_whichever_file_of_its_numbers_is_damaged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "whole", epochs=2, samples=16, noisy=False)
    garbage = random.Random(0).randbytes(300) + b"\n"
    names = ("config.json", "losses.csv", "metrics.csv", "ranks.jsonl", "events.jsonl")
    for number, damage in enumerate((dict.fromkeys(names, garbage), {"config.json": b'{"starts": 3}'})):
        out = tmp_path / str(number)
        with pytest.raises(CutOffError):
            train(out, epochs=2, samples=16, noisy=False, cut_at_step=3)
        rows = read_rows(out / "losses.csv")
        for name, text in damage.items():
            with open(out / name, "wb" if name == "config.json" else "ab") as file:
                file.write(text)
        capfd.readouterr()
        resumed = train(out, epochs=2, samples=16, noisy=False)
        assert (resumed["began_at"], resumed["fingerprint"]) == (2, whole["fingerprint"])
        assert read_rows(out / "losses.csv")[:2] == rows[:2]
        printed = capfd.readouterr().out
        for name in damage.keys() & {"config.json", "losses.csv"}:
            assert f"warning: {out / name} " in printed
            assert damage[name] in (out / f"{name}.damaged").read_bytes()


def test_a_damaged_manifest_is_reported_where_the_best_is_chosen_and_before_it_is_deleted(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=3, best="accuracy")
    for step, accuracy in ((1, 0.9), (2, 0.5), (3, 0.6)):
        folder.save(step, state(step), description={}, metric=accuracy)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"0.9", b"0.8"))
    for find in (folder.best, lambda: find_checkpoint(tmp_path, best="accuracy")):
        with pytest.warns(RuntimeWarning, match=r"step-00000003 is used instead: \S+step-00000001.* is damaged"):
            found = find()
        assert found is not None
        assert found.step == 3
    with pytest.warns(RuntimeWarning, match=r"step-00000001\S+ is damaged.* This checkpoint is deleted"):
        folder.save(4, state(4), description={}, metric=0.1)
