"""Fashion-MNIST, the nanoGPT-style script and the Llama: what they reach, and the same on one process and on two."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from difflib import unified_diff
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from photinus.runlog.events import read_events
from photinus.runlog.tables import read_rows
from tests.fork_server import REPOSITORY
from tests.scripts import run_forked
from tests.strangers.documents import blocks

EXAMPLES = REPOSITORY / "examples"
PICTURES = Path("/usr/share/datasets/fashion-mnist")
TEXT = Path("/usr/share/common-licenses/GPL-3")
BIN = Path(sys.executable).parent
LAUNCHERS = {"one": [sys.executable], "two": [str(BIN / "photinus"), "run", "--nproc-per-node", "2"]}


def run(launcher: str, script: str, *words: str, folder: Path) -> str:
    done = subprocess.run(
        [*LAUNCHERS[launcher], str(EXAMPLES / script), *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def idx(*sizes: int, values: bytes) -> bytes:
    return bytes([0, 0, 8, len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes) + values


@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.skipif(not PICTURES.exists(), reason="needs Debian's dataset-fashion-mnist")
def test_fashion_mnist_reaches_88_percent_with_the_same_losses_on_one_process_and_two(tmp_path: Path) -> None:
    for name in LAUNCHERS:
        run(name, "fashion_mnist/train.py", "--out", name, folder=tmp_path)
        assert read_rows(tmp_path / name / "metrics.csv")[-1]["accuracy"] >= 0.88
    one, two = ([row["loss"] for row in read_rows(tmp_path / name / "losses.csv")] for name in LAUNCHERS)
    assert len(one) == 3 * -(-60_000 // 128)
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_shifted_digits_reach_95_percent_with_the_same_first_losses_on_one_process_and_two(tmp_path: Path) -> None:
    for name in LAUNCHERS:
        run(name, "first/images.py", name, folder=tmp_path)
        assert read_rows(tmp_path / name / "metrics.csv")[-1]["accuracy"] >= 0.95
    one, two = ([row["loss"] for row in read_rows(tmp_path / name / "losses.csv")] for name in LAUNCHERS)
    assert len(one) == 20 * -(-1437 // 128)
    assert two[:12] == pytest.approx(one[:12], rel=1e-4)


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_reads_a_folder_of_idx_files(tmp_path: Path, packed: bool) -> None:
    for part in ("train", "t10k"):
        files = {
            f"{part}-images-idx3-ubyte": idx(256, 28, 28, values=bytes(range(256)) * 784),
            f"{part}-labels-idx1-ubyte": idx(256, values=bytes(range(8)) * 32),
        }
        for name, content in files.items():
            (tmp_path / f"{name}{'.gz' * packed}").write_bytes(gzip.compress(content) if packed else content)
    script = EXAMPLES / "fashion_mnist/train.py"
    words = ["--data", str(tmp_path), "--out", str(tmp_path / "run"), "--epochs"]
    done = run_forked(script, *words, "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(read_rows(tmp_path / "run/losses.csv")) == 2
    (tmp_path / f"t10k-labels-idx1-ubyte{'.gz' * packed}").unlink()
    done = run_forked(script, *words, "2")
    assert done.returncode == 1
    missing = f"{tmp_path}/t10k-labels-idx1-ubyte.gz is missing: apt install dataset-fashion-mnist, or give --data"
    assert missing in done.stderr


def code(script: str) -> list[str]:
    """The lines of a script below its docstring, without empty ones."""
    return [line for line in (EXAMPLES / script).read_text().split('"""', 2)[2].splitlines() if line]


def test_nanogpt_on_many_devices_is_the_script_for_one_with_the_lines_that_its_page_shows() -> None:
    old, new = code("nanogpt/one_device.py"), code("nanogpt/train.py")
    changed = [line for line in unified_diff(old, new, lineterm="", n=0) if line[:2] not in ("--", "++", "@@")]
    (shown,) = (block.text.splitlines() for block in blocks("examples/nanogpt/README.md") if block.language == "diff")
    assert changed == shown
    assert len([line for line in changed if line[0] == "+"]) <= 7  # six, one of them in two lines
    assert len(old) > 70


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not TEXT.exists(), reason=f"needs {TEXT}, which every Debian has")
def test_nanogpt_learns_the_same_on_one_device_and_on_two_ranks_and_prints_what_its_page_shows(tmp_path: Path) -> None:
    import torch

    losses, models = {}, {}
    for name, launcher, script in (("plain", "one", "one_device"), ("one", "one", "train"), ("two", "two", "train")):
        said = run(launcher, f"nanogpt/{script}.py", "--out", name, folder=tmp_path)
        losses[name] = [float(each) for each in re.findall(r"loss ([\d.]+)", said)]
        models[name] = torch.load(tmp_path / name / "ckpt.pt", weights_only=True)["model"]
    assert len(losses["plain"]) == 2 * 5
    assert losses["plain"][-1] < 2.3  # of 4.5 at the start, for text that the model never saw
    for name in ("one", "two"):
        assert losses[name] == pytest.approx(losses["plain"], abs=5e-3)
        assert models[name].keys() == models["plain"].keys()
        assert all(torch.allclose(models[name][key], value, atol=0.02) for key, value in models["plain"].items())
    page = (EXAMPLES / "nanogpt/README.md").read_text()
    shown = [float(each) for line in re.findall("^step .*", page, re.M) for each in re.findall(r"loss ([\d.]+)", line)]
    assert len(shown) == 4
    assert shown == pytest.approx(losses["two"][: len(shown)], abs=5e-3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_llama_learns_the_same_on_one_process_and_on_two_and_a_killed_rank_costs_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("transformers", "datasets", "wandb"):  # not imported: wandb leaves folders
        if find_spec(package) is None:
            pytest.skip(f"examples/transformers needs {package}")
    script = "transformers/train.py"
    assert len((EXAMPLES / script).read_text().splitlines()) <= 40
    for name in ("HF_HOME", "TMPDIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ends = [run(name, script, name, folder=tmp_path) for name in LAUNCHERS]
    assert all("stopped: step 60 of 500, in epoch 1 (valid_loss did not fall below" in said for said in ends)
    one, two = ([row["loss"] for row in read_rows(tmp_path / name / "losses.csv")] for name in LAUNCHERS)
    assert one[-1] < 3.2 < 5 < one[0]
    assert two == pytest.approx(one, rel=0.01)  # bfloat16
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*LAUNCHERS["two"], str(EXAMPLES / script), "killed"]
    with (tmp_path / "log").open("w+") as log:
        job = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=log, stderr=log)
        try:
            losses, deadline = tmp_path / "killed" / "losses.csv", time.monotonic() + 300
            while not (losses.exists() and len(losses.read_text().splitlines()) > 33):
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.05)
            started = [event for event in read_events(tmp_path / "killed") if event.kind == "start"]
            os.kill(int(started[-1].facts["pid"]), signal.SIGKILL)  # rank 0
            assert job.wait(timeout=400) == 0, (tmp_path / "log").read_text()
        finally:
            if job.poll() is None:
                job.kill()
                job.wait()
    assert "restart 1 of" in (tmp_path / "log").read_text()
    digests = [_digests(tmp_path / name) for name in ("two", "killed")]
    assert digests[0] == digests[1]
    assert {"model", "optimizer", "average", "early_stopping"} <= digests[0].keys()
    assert list((tmp_path / "killed" / "wandb").glob("offline-run-*/run-*.wandb"))


def _digests(out: Path) -> dict[str, Any]:
    newest = sorted((out / "checkpoints").glob("step-*"))[-1]
    files = json.loads((newest / "manifest.json").read_text())["files"]
    return {name: files[name] for name in files if name in ("model", "optimizer", "average", "early_stopping")}
