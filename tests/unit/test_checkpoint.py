"""A folder of checkpoints: what is written, found, kept, and refused."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import photinus
from photinus.errors import CheckpointError
from photinus.trainer.checkpoint import durable, manifest
from photinus.trainer.checkpoint.durable import lock_folder
from photinus.trainer.checkpoint.folder import Checkpoint, CheckpointFolder, find_checkpoint


def state(step: int, elems: int = 50) -> dict[str, Any]:
    return {"model": {"weight": torch.full((elems,), float(step))}, "position": {"step": step, "text": f"at {step}"}}


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def same(checkpoint: Checkpoint | None, step: int) -> bool:
    assert checkpoint is not None
    loaded = checkpoint.load()
    assert torch.equal(loaded["model"]["weight"], state(step)["model"]["weight"])
    return checkpoint.step == step and loaded["position"] == state(step)["position"]


def test_what_was_saved_is_found_and_loaded(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    assert folder.newest() is None
    assert folder.best() is None
    path = folder.save(123, state(123), description={"epoch": 2, "note": "é", "nan": math.nan}, metric=0.5)
    assert path == tmp_path / "run" / "checkpoints" / "step-00000123"
    found = folder.newest()
    assert found is not None
    assert same(found, 123)
    assert (found.path, found.metric, found.entries) == (path, 0.5, ["model", "position"])
    assert (found.description["epoch"], found.description["note"]) == (2, "é")
    assert same(folder.best(), 123)
    assert list(found.load(only=["position"])) == ["position"]
    with pytest.raises(CheckpointError, match="no entry 'optimizer'; it has model, position"):
        found.load(only=["optimizer"])


def test_a_folder_whose_name_is_no_utf_8_serves_as_well(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / os.fsdecode(b"l\xe4uf"))
    folder.save(7, state(7), description={})
    found = folder.newest()
    assert found is not None
    assert found.load(mapped=["model"])["model"]["weight"][0] == 7


def test_the_folder_holds_plain_torch_files_and_a_readable_manifest(tmp_path: Path) -> None:
    path = CheckpointFolder(tmp_path).save(7, state(7), description={"lr": 0.1})
    assert torch.load(path / "model.pt", weights_only=True)["weight"][0] == 7
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["description"]) == (3, 7, {"lr": 0.1})
    assert (manifest["photinus"], manifest["torch"]) == (photinus.__version__, torch.__version__)
    for entry, record in manifest["files"].items():
        file = path / f"{entry}.pt"
        assert (file.stat().st_size, durable.verify_archive(file)) == (record["bytes"], record["digest"])
    assert sorted(os.listdir(path)) == ["manifest.json", "model.pt", "position.pt"]
    assert sorted(os.listdir(tmp_path)) == [".writer.lock", "step-00000007"]


def test_objects_are_saved_by_their_state(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    folder = CheckpointFolder(tmp_path)
    folder.save(1, {"model": model, "optimizer": optimizer}, description={})
    found = folder.newest()
    assert found is not None
    loaded = found.load()
    other = nn.Linear(3, 2)
    other.load_state_dict(loaded["model"])
    assert torch.equal(other.weight, model.weight)
    torch.optim.Adam(other.parameters()).load_state_dict(loaded["optimizer"])
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=2)
    for step, metric in enumerate([0.1, 0.9, 0.3, None, 0.8, math.nan, 0.2, 0.4]):
        folder.save(step, state(step), description={}, metric=metric)
        assert same(folder.newest(), step)
    assert steps(tmp_path) == [f"step-{step:08d}" for step in (1, 6, 7)]
    assert same(folder.best(), 1)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_all_is_on_disk_before_it_has_its_name_and_the_name_before_what_is_older_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The order of the calls: what a power cut keeps no other test can see, since a kill leaves the page cache."""
    folder, calls = CheckpointFolder(tmp_path, keep_last=1), []

    def note(what: str, path: Any) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path)
        name = re.sub(r"\.tmp-([a-z.0-9-]+)-[0-9a-f]{8}", r"new \1", str(path.relative_to(tmp_path.parent)))
        call = f"{what} {name.removeprefix(tmp_path.name).lstrip('/') or 'parent'}"
        if call not in calls[-1:]:  # many writes are one
            calls.append(call)

    def watched(name: str, target: int) -> Any:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            note(name, arguments[target])
            return real(*arguments, **options)

        return call

    if kind == "folder":
        folder.save(1, state(1), description={})
    for name, target in (("write", 0), ("fsync", 0), ("rename", 1), ("replace", 1)):
        monkeypatch.setattr(os, name, watched(name, target))
    if kind == "folder":
        folder.save(2, state(2), description={})
        inside = [f"new step-00000002/{name}" for name in ("model.pt", "position.pt", "manifest.json")]
        written = [f"{what} {name}" for name in inside for what in ("write", "fsync")]
        named = ["fsync new step-00000002", "replace step-00000002", "fsync parent", "rename new step-00000001"]
        assert calls == written + named
    else:
        photinus.save(tmp_path / "last.pt", **state(1))
        assert calls == ["write new last.pt", "fsync new last.pt", "replace last.pt", "fsync parent"]


def test_a_checkpoint_for_which_there_is_no_space_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, state(1), description={})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    monkeypatch.setattr(torch, "save", None)  # not reached
    for save in (lambda: folder.save(2, state(2), description={}), lambda: photinus.save(tmp_path / "f", **state(2))):
        with pytest.raises(CheckpointError, match=r"needs \d+ bytes .* and 1000 .* are free"):
            save()
    assert steps(tmp_path) == ["step-00000001"]


def test_a_low_metric_can_be_the_best_and_of_equals_the_newest(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=1, best="-loss")
    for step, metric in enumerate([0.5, 0.2, 0.7, 0.2, 0.9]):
        folder.save(step, state(step), description={}, metric=metric)
    assert same(folder.best(), 3)
    assert steps(tmp_path) == ["step-00000003", "step-00000004"]


def test_saving_over_and_over_keeps_no_more_than_it_should(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=3)
    for step in range(60):
        folder.save(step, state(step), description={})
        assert len(steps(tmp_path)) == min(step + 1, 3)
    assert steps(tmp_path) == [f"step-{step:08d}" for step in (57, 58, 59)]


def test_a_step_saved_again_replaces_what_was_saved_for_it(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=2)
    folder.save(4, state(4), description={"attempt": 0}, metric=1.0)
    for attempt in range(1, 4):
        folder.save(5, state(5), description={"attempt": attempt}, metric=attempt / 10)
        found = folder.newest()
        assert found is not None
        assert found.description == {"attempt": attempt}
        assert same(found, 5)
        assert len(steps(tmp_path)) == 2


def test_the_newest_is_the_one_written_last_not_the_highest_step(tmp_path: Path) -> None:
    """Who goes back to an earlier step on purpose must not be thrown forward at the next resume."""
    folder = CheckpointFolder(tmp_path, keep_last=3)
    for step in (100, 200, 150):
        folder.save(step, state(step), description={})
    assert same(folder.newest(), 150)


def test_a_damaged_newest_is_reported_and_the_one_before_is_used(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, state(step), description={}, metric=step)
    with (tmp_path / "step-00000002" / "model.pt").open("r+b") as file:
        file.seek(800)
        file.write(b"\xff\x00\xff")
    with pytest.warns(
        RuntimeWarning, match=r"step-00000002/model.pt is damaged: checksum of its .* expected ........, actual"
    ):
        assert same(folder.newest(), 1)
    with pytest.warns(RuntimeWarning, match=r"step-00000002/model\.pt is damaged"):
        assert same(folder.best(), 1)
    with pytest.raises(
        CheckpointError, match=r"checksum of its record 'archive/\S+' expected ........, actual ........"
    ):
        find_checkpoint(tmp_path / "step-00000002")


def test_a_damaged_one_does_not_count_as_one_of_the_last(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=2)
    folder.save(1, state(1), description={})
    folder.save(2, state(2), description={})
    os.truncate(tmp_path / "step-00000002" / "model.pt", 10)
    folder.save(3, state(3), description={})
    assert steps(tmp_path) == ["step-00000001", "step-00000003"]


def test_damaged_checkpoints_only_are_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, state(1), description={})
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: .*has no manifest.json.*start over"):
        folder.newest()
    (tmp_path / "step-00000001" / "model.pt").unlink()
    folder.save(2, state(2), description={})  # one without a manifest may be another's: it is not deleted
    with pytest.warns(RuntimeWarning, match=r"has no manifest\.json"):
        assert same(folder.newest(), 2)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: (path / "model.pt").unlink(), "model.pt is missing"),
        (lambda path: (path / "model.pt").write_bytes(b""), "model.pt is damaged: it has 0 bytes instead of"),
        (lambda path: (path / "model.pt").open("ab").write(b"\0"), r"model.pt is damaged: it has \d+ bytes instead of"),
        (lambda path: shutil.copy(path / "position.pt", path / "model.pt"), "model.pt is damaged"),
        (lambda path: shutil.copy(path.parent / "step-00000001/model.pt", path / "model.pt"), "model.pt is damaged"),
        (lambda path: shutil.copy(path.parent / "step-00000001/manifest.json", path), "holds step 1.*mixed from two"),
        (lambda path: (path / "manifest.json").write_text("{}"), "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").write_bytes(b""), "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").write_bytes(b"\xff" * 500), "manifest.json is damaged"),
        (lambda path: ((path / "model.pt").unlink(), (path / "model.pt").mkdir()), "damaged|cannot be read"),
    ],
)
def test_whatever_is_wrong_with_a_checkpoint_is_named(tmp_path: Path, harm: Any, said: str) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, state(step), description={})
    harm(tmp_path / "step-00000002")
    with pytest.raises(CheckpointError, match=said):
        find_checkpoint(tmp_path / "step-00000002")
    with pytest.warns(RuntimeWarning, match=said):
        assert same(folder.newest(), 1)


@pytest.mark.parametrize("future", [1, 4])
def test_a_manifest_of_another_format_is_refused_by_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, future: int
) -> None:
    folder = CheckpointFolder(tmp_path)
    monkeypatch.setattr("photinus.trainer.checkpoint.manifest._FORMAT", future)
    monkeypatch.setattr("photinus.trainer.checkpoint.manifest._READABLE", (future,))
    path = folder.save(1, state(1), description={})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=rf"format {future}, written by photinus .*; this one reads 2 and 3"):
        find_checkpoint(path)


def test_damage_after_the_choice_is_noticed_before_loading(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, state(1), description={})
    found = folder.newest()
    assert found is not None
    data = bytearray((found.path / "model.pt").read_bytes())
    data[800] ^= 1
    (found.path / "model.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.pt is damaged: checksum of its record"):
        found.load()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("step", text) for text in ("16.9", "-1", '"16"', "true", "1e999")),
        *(("serial", text) for text in ("-5", "1" * 4000, "9" * 100_000)),
        *(("metric", text) for text in ("NaN", "1" * 4000)),
        ("bytes", "7.5"),
    ],
    ids=lambda text: text[:8],
)
def test_a_number_in_a_manifest_that_cannot_be_is_refused(tmp_path: Path, name: str, text: str) -> None:
    path = CheckpointFolder(tmp_path).save(16, state(1), description={}, metric=1.0)
    head = (path / "manifest.json").read_bytes().rpartition(b",\n")[0]
    head = re.sub(rb'("%s": )[\d.]+' % name.encode(), rb"\g<1>" + text.encode(), head, count=1)
    (path / "manifest.json").write_bytes(head + manifest._seal(head))
    with pytest.raises(CheckpointError, match=r"manifest\.json is not a manifest of photinus") as caught:
        CheckpointFolder(tmp_path).newest()
    assert len(str(caught.value)) < 600


def test_a_path_is_a_checkpoint_or_a_folder_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path / "a")
    for step in (1, 2):
        folder.save(step, state(step), description={})
    assert same(find_checkpoint(tmp_path / "a"), 2)
    assert same(find_checkpoint(tmp_path / "a" / "step-00000001"), 1)
    shutil.copytree(tmp_path / "a" / "step-00000001", tmp_path / "kept for the paper")
    assert same(find_checkpoint(tmp_path / "kept for the paper"), 1)
    monkeypatch.chdir(tmp_path)
    assert same(find_checkpoint(Path("a")), 2)
    with pytest.raises(CheckpointError, match=r"has no manifest\.json: not a checkpoint"):
        find_checkpoint(tmp_path)
    (tmp_path / "file.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"file\.pt is a file; checkpoints need a folder"):
        find_checkpoint(Path("file.pt"))


def test_what_a_dead_writer_left_is_removed_and_a_live_ones_is_not(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, state(1), description={})
    debris = tmp_path / ".tmp-step-00000002-deadbeef"
    debris.mkdir()
    (debris / "model.pt").write_bytes(b"half")
    assert same(folder.newest(), 1)
    assert debris.exists()  # readers delete nothing
    folder.save(2, state(2), description={})
    assert sorted(os.listdir(tmp_path)) == [".writer.lock", "step-00000001", "step-00000002"]


@pytest.mark.seconds
def test_two_jobs_in_one_folder_are_told_who_the_other_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", f"""
from pathlib import Path
from photinus.trainer.checkpoint.durable import lock_folder
with lock_folder(Path({str(tmp_path)!r})):
    print("locked", flush=True)
    input()
"""],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=f"process {holder.pid} on host .* has been writing into"):
            with lock_folder(tmp_path, timeout_s=0.2):
                pass
        holder.kill()  # the kernel lets go of the lock
        holder.wait()
        CheckpointFolder(tmp_path).save(1, state(1), description={})
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"step": -1}, ValueError, "step=-1"),
        ({"step": 1.5}, TypeError, "step needs a whole number"),
        ({"state": {}}, ValueError, "no state"),
        ({"state": {"../escape": 1}}, ValueError, "'../escape' cannot name a file"),
        ({"state": {"manifest.json/x": 1}}, ValueError, "cannot name a file"),
        ({"state": {"f": {"here": [len]}}}, TypeError, r"f\['here'\]\[0\] is a builtins.builtin_function_or_method"),
        ({"state": {"n": 1 << 3000}}, TypeError, r"n is a number of 3001 bits, which could be saved and not be loaded"),
        ({"description": {"path": Path()}}, TypeError, "JSON serializable"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    folder = CheckpointFolder(tmp_path / "new")
    with pytest.raises(error, match=said):
        folder.save(**{"step": 1, "state": state(1), "description": {}, **arguments})
    assert not (tmp_path / "new").exists()


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last=0"):
        CheckpointFolder(tmp_path, keep_last=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        CheckpointFolder(tmp_path / "file")


def test_an_exception_while_writing_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, state(1), description={})
    calls = []

    def interrupted(value: Any, file: Any) -> None:
        file.write(b"half a file")
        calls.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folder.save(2, state(2), description={})
    assert calls == [1]
    assert sorted(os.listdir(tmp_path)) == [".writer.lock", "step-00000001"]
    monkeypatch.undo()
    assert same(folder.newest(), 1)


def test_nothing_is_warned_about_when_all_is_well(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder = CheckpointFolder(tmp_path)
        for step in range(4):
            folder.save(step, state(step), description={}, metric=0.0)
        folder.newest()
        folder.best()


def test_a_disk_that_reads_less_than_it_is_asked_for_changes_no_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = CheckpointFolder(tmp_path).save(1, {"model": torch.randn(800_000)}, description={}) / "model.pt"
    wanted, read = durable.verify_archive(path), os.pread  # as over NFS
    monkeypatch.setattr(os, "pread", lambda file, size, at: read(file, min(size, 700_001), at))
    assert durable.verify_archive(path) == wanted


@pytest.mark.parametrize(
    "crafted",
    [
        {"files": {"../../secret": {"bytes": 1, "digest": "x"}}},
        {"files": {"/etc/hostname": {"bytes": 1, "digest": "x"}}},
        {"files": ["model"]},
        {"files": {"model": {"bytes": math.inf, "digest": "x"}}},
        {"metric": "best"},
        {"description": [1]},
        {"step": None},
    ],
)
def test_a_crafted_manifest_is_refused(tmp_path: Path, crafted: dict[str, Any]) -> None:
    path = CheckpointFolder(tmp_path).save(1, state(1), description={}) / "manifest.json"
    head = json.dumps({**json.loads(path.read_text()), **crafted}).removesuffix("}").encode()
    path.write_bytes(head + manifest._seal(head))
    with pytest.raises(CheckpointError, match=r"manifest\.json is not a manifest of photinus"):
        CheckpointFolder(tmp_path).newest()


def test_a_manifest_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = CheckpointFolder(tmp_path).save(1, state(1), description={}) / "manifest.json"
    head = b'{"description": ' + b"[" * 100_000 + b"]" * 100_000
    path.write_bytes(head + manifest._seal(head))
    with pytest.raises(CheckpointError, match=r"manifest\.json is not a manifest of photinus"):
        CheckpointFolder(tmp_path).newest()
