"""Runs as the script that recovery.py starts: recovering.py photinus|torchrun digits|gpt FOLDER

Writes the clock (CLOCK_MONOTONIC, the same for all processes of a machine) into files of FOLDER: of each attempt and
rank at its first line, after the imports, in the group, with its state loaded, and after its first step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

SYSTEM, MODEL, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def note(name: str, text: str = "") -> None:
    """Write a file whole or not at all."""
    new = FOLDER / f".{name}.{ATTEMPT}.{RANK}"
    new.write_text(text or repr(time.monotonic()))
    new.rename(FOLDER / new.name[1:])


note("pid", str(os.getpid()))
note("started")

import csv  # noqa: E402
import gzip  # noqa: E402
import importlib.util  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

SAVE_EVERY = 10  # torchrun's script
STEPS = 10**6
EXAMPLES = Path(__file__).parents[2] / "examples"


def training() -> tuple[nn.Module, TensorDataset, int]:
    """Return model, data and a rank's batch."""
    name = "digits" if MODEL == "digits" else "gpt"
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / name / "model.py")
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    if MODEL == "digits":
        package = importlib.util.find_spec("sklearn")
        assert package is not None
        assert package.origin is not None
        with gzip.open(Path(package.origin).parent / "datasets/data/digits.csv.gz", "rt") as file:
            table = torch.tensor([[float(cell) for cell in row] for row in csv.reader(file)])
        return example.DigitsNet(), TensorDataset(table[:, :-1].div(16).view(-1, 1, 8, 8), table[:, -1].long()), 32
    model = example.GPT(1024, width=512, layers=6, heads=8)  # 20 M parameters
    pieces = torch.randint(1024, (4096, model.context + 1), generator=torch.Generator().manual_seed(0))
    return model, TensorDataset(pieces[:, :-1], pieces[:, 1:]), 2


def loss_of(model: nn.Module, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean over all pieces or images."""
    return cross_entropy(model(given).flatten(0, -2), wanted.flatten())


def run_photinus() -> None:
    """Trains with a snapshot after every step."""
    import photinus

    note("imported")
    with photinus.init(seed=0) as world:
        note("joined")
        model, data, batch = training()
        model, optimizer = photinus.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        loop = photinus.Loop(
            model, optimizer, data, batch_size=batch * world.world_size, steps=STEPS, out=FOLDER / "run",
            save=photinus.Saving(snapshot_every=1), report=photinus.Reporting(progress=False, curves=False),
        )  # fmt: skip
        note("loaded", f"{time.monotonic()} {loop.step}")
        for given, wanted in loop:
            note("finished", str(loop.step - 1))
            loop.backward(loss_of(model, given, wanted))
            optimizer.step()
            optimizer.zero_grad()
            if ATTEMPT:
                break
        note("step")


def run_torchrun() -> None:
    """Trains with torch's DDP, and rank 0 saves every few steps by torch.save."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    note("imported")
    dist.init_process_group("gloo")
    note("joined")
    torch.manual_seed(0)
    model, data, batch = training()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    path, step = FOLDER / "state.pt", 0
    if path.exists():
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    note("loaded", f"{time.monotonic()} {step}")
    while True:
        note("finished", str(step))
        places = torch.randint(len(data), (batch,))
        given, wanted = (tensor[places] for tensor in data.tensors)
        loss_of(ddp, given, wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if ATTEMPT:
            break
        if step % SAVE_EVERY == 0 and RANK == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, FOLDER / "new.pt"
            )
            (FOLDER / "new.pt").rename(path)
    note("step")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"photinus": run_photinus, "torchrun": run_torchrun}[SYSTEM]()
