"""The Trainer and the Loop on a GPU: precision, loader, checkpoints, numbers, and where a step's time goes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import photinus
from photinus.runlog.tables import PHASES, read_window
from photinus.trainer.checkpoint import image, image_reader
from photinus.trainer.data.loader import loader
from tests.gpu.device import DEVICE, HAS_GPU, NAME, settle
from tests.small_run import CutOffError, train

needs_gpu = pytest.mark.needs_gpu


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVICE_OF_TEST", NAME)
    if HAS_GPU:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def model_of(width: int = 256) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 8))


def data_of(samples: int = 512) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 32, generator=generator)
    return TensorDataset(x, x[:, :8].argmax(dim=1))


def losses_of(device: str, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options["report"] = photinus.Reporting(progress=False)
    trainer = photinus.Trainer(model, optimizer, F.cross_entropy, epochs=3, batch_size=64, **options)
    with photinus.init(device=device):
        return [float(row["loss"]) for row in trainer.fit(data_of()).history]


def test_losses_are_those_of_the_cpu(record_property: Any) -> None:
    ours, cpu = losses_of(NAME), losses_of("cpu")
    record_property("largest deviation", max(abs(a / b - 1) for a, b in zip(ours, cpu, strict=True)))
    assert ours == pytest.approx(cpu, rel=1e-4)


def test_the_trainer_learns_in_bfloat16(record_property: Any) -> None:
    half, full = losses_of(NAME, precision="bfloat16"), losses_of(NAME)
    record_property("last loss, beside float32", f"{half[-1]:.4f}, {full[-1]:.4f}")
    assert half != full
    assert half[-1] == pytest.approx(full[-1], rel=0.05)


def test_a_loop_learns_in_float16_with_a_scaler() -> None:
    with photinus.init(device=NAME, backend="gloo" if NAME == "cpu" else "auto", seed=1):
        plain = model_of()
        model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler(NAME, init_scale=2.0**24, growth_interval=50)  # too high at first
        loop = photinus.Loop(
            model,
            optimizer,
            data_of(),
            batch_size=64,
            epochs=6,
            state={"scaler": scaler},
            report=photinus.Reporting(progress=False),
        )
        for x, y in loop:
            with torch.autocast(NAME, torch.float16):
                loss = F.cross_entropy(model(x).float(), y)
            loop.backward(loss, scaler=scaler)
            scaler.unscale_(optimizer)
            loop.clip(5.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    first, last = float(loop.history[0]["loss"]), float(loop.history[-1]["loss"])
    assert last < first < 3, "the loss that is told is not scaled"


def test_a_killed_run_goes_on_bit_for_bit_with_dropout(tmp_path: Path) -> None:
    backend = "nccl" if HAS_GPU else "gloo"
    whole = train(tmp_path / "whole", backend=backend)
    with pytest.raises(CutOffError):
        train(tmp_path / "cut", backend=backend, save_every=2, cut_at_step=9)
    resumed = train(tmp_path / "cut", backend=backend, save_every=2)
    assert resumed["began_at"] == 8
    assert resumed["fingerprint"] == whole["fingerprint"]


@needs_gpu("a checkpoint saved on the GPU would go on on the CPU, and one of the CPU on the GPU")
def test_checkpoints_go_from_the_gpu_to_the_cpu_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    with pytest.raises(CutOffError):
        train(out, backend="nccl", save_every=2, cut_at_step=5, dropout=0.0)
    monkeypatch.setenv("DEVICE_OF_TEST", "cpu")
    with pytest.warns(RuntimeWarning, match="CUDA random state") if not torch.cuda.is_available() else _nothing():
        with pytest.raises(CutOffError):
            train(out, backend="gloo", save_every=2, cut_at_step=11, dropout=0.0)
    monkeypatch.setenv("DEVICE_OF_TEST", "cuda")
    there_and_back = train(out, backend="nccl", save_every=2, dropout=0.0)
    whole = train(tmp_path / "whole", backend="nccl", dropout=0.0)
    assert there_and_back["began_at"] == 10
    losses = [[float(row["loss"]) for row in each["history"]] for each in (there_and_back, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def test_batches_come_to_the_device_pinned_where_there_is_one() -> None:
    batches = list(loader(data_of(), batch_size=64, train=True, place=(0, 1), device=DEVICE, seed=0))
    reference = list(loader(data_of(), batch_size=64, train=True, place=(0, 1), device="cpu", seed=0))
    for (x, y), (a, b) in zip(batches, reference, strict=True):
        assert x.device.type == NAME
        assert x.cpu().equal(a)
        assert y.cpu().equal(b)
    with_workers = loader(data_of(), batch_size=64, train=True, place=(0, 1), device=DEVICE, seed=0, num_workers=2)
    assert all(x.cpu().equal(a) for (x, _), (a, _) in zip(with_workers, reference, strict=True))


@needs_gpu("the copies of pinned batches would be queued while the device computes")
def test_loading_does_not_wait_for_the_device(record_property: Any) -> None:
    import time

    big = TensorDataset(torch.randn(64, 1 << 18))
    weights = torch.randn(8192, 8192, device=DEVICE)
    busy = weights
    settle()
    began = time.perf_counter()
    for (x,) in loader(big, batch_size=8, train=True, place=(0, 1), device=DEVICE, seed=0):
        for _ in range(4):
            busy = busy @ weights / 8192
        assert x.is_cuda
    queued_s = time.perf_counter() - began
    settle()
    done_s = time.perf_counter() - began
    record_property("loaded after, s", round(queued_s, 4))
    record_property("computed after, s", round(done_s, 4))
    assert queued_s < 0.8 * done_s


def test_a_runs_folder_has_the_phases_and_the_memory_of_the_device(tmp_path: Path, record_property: Any) -> None:
    """Wide layers: on a GPU Python is through with a step long before the device is."""
    width = 8192 if HAS_GPU else 128
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    out = tmp_path / "run"
    trainer = photinus.Trainer(
        model, optimizer, F.cross_entropy, epochs=60 if HAS_GPU else 2, batch_size=256, out=out,
        save=photinus.Saving(every_epochs=100), report=photinus.Reporting(progress=False, curves=False),
    )  # fmt: skip
    with photinus.init(device=NAME):
        trainer.fit(data_of(4096))
    windows = [found for line in (out / "ranks.jsonl").read_text().splitlines() if (found := read_window(line))]
    # The first step waits for libraries to wake up.
    phases = {name: sum(window.phases[name][0] for window in windows[1:] or windows) for name in PHASES}
    record_property("phases, s per step", {name: round(seconds, 5) for name, seconds in phases.items()})
    assert phases["forward"] > 0
    assert phases["backward"] > phases["data"]
    memory = windows[-1].memory
    record_property("memory, MiB", {name: value[0] >> 20 for name, value in memory.items()})
    if HAS_GPU:
        assert phases["backward"] > 1.2 * phases["forward"], "a backward has twice the products of a forward"
        assert 0 < memory["cuda"][0] <= memory["cuda_peak"][0] <= torch.cuda.get_device_properties(DEVICE).total_memory
        assert memory["cuda_peak"][0] > 4 * width * width


@pytest.mark.parametrize("skip", [3])
def test_a_trace_lasts_as_long_as_the_device_does(tmp_path: Path, skip: int, record_property: Any) -> None:
    import torch.distributed as dist

    from tests.gpu.rank_cases import wrapped

    size = 4096 if HAS_GPU else 64
    dist.init_process_group("nccl" if HAS_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = wrapped(nn.Sequential(*(nn.Linear(size, size) for _ in range(4))).to(DEVICE), "photinus")
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-6)
        x = torch.randn(size, size, device=DEVICE)
        with photinus.trace(tmp_path / "trace.json", skip=skip, steps=4) as trace:
            for _ in range(skip + 5):
                ddp(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        (shares,) = trace.shares()
        record_property("shares", str(shares))
        assert shares.steps == 4
        assert shares.backward > shares.forward > 0
        assert shares.exchange > 0
        if HAS_GPU:
            assert shares.backward > 1.3 * shares.forward
    finally:
        dist.destroy_process_group()


def test_a_snapshot_has_what_the_device_held_before_the_next_step_was_queued() -> None:
    descriptor = os.memfd_create("gpu-snapshot")
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    large, small = torch.zeros(1 << 27, device=DEVICE), torch.zeros(1 << 10, device=DEVICE)
    content = image.Content({"large": large, "small": small}, {})
    file = image.MemoryFile(path)
    for step in range(3):
        settle()
        copy = image.Copy(image.Head("run", step, 0, 1, 0, 1), content)
        copy.take(file)
        large.add_(1)
        small.add_(1)
        copy.seal_beside()
        copy.wait()
        image_reader.verify(path)
        found = image_reader.load(image_reader.open_files([path]))
        assert (found["large"] == step).all()
        assert (found["small"] == step).all()
    os.close(descriptor)
