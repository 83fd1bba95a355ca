"""Runs as the script that launches.py starts: launched.py first-step | recover | train FOLDER

Writes the clock (CLOCK_MONOTONIC, the same for all processes of a machine) into files of FOLDER.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def note(folder: Path, name: str) -> None:
    (folder / name).write_text(repr(time.monotonic()))


def main(what: str, folder: Path) -> None:
    import torch
    from torch.nn.functional import mse_loss
    from torch.utils.data import TensorDataset

    import photinus

    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    with photinus.init(seed=3) as world:
        x = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 16))
        model, optimizer = photinus.wrap(model, torch.optim.Adam(model.parameters(), lr=1e-3))
        options = {} if what == "first-step" else {"out": folder / "run", "save": photinus.Saving(every_steps=10)}
        options["report"] = photinus.Reporting(progress=False, curves=False)
        loop = photinus.Loop(model, optimizer, TensorDataset(x, x), batch_size=32, epochs=8, **options)
        for given, wanted in loop:
            loop.backward(mse_loss(model(given), wanted))
            loop.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if what == "first-step":
                note(folder, f"step.{world.rank}")
                break
            if what == "recover":
                if attempt and not (folder / f"step.{world.rank}").exists():
                    note(folder, f"step.{world.rank}")
                if not attempt and loop.step == 15 and world.rank == 1:
                    note(folder, "killed")
                    os.kill(os.getpid(), signal.SIGKILL)
            if what == "train":
                (folder / f"pid.{world.rank}").write_text(str(os.getpid()))
                time.sleep(0.02)
        if what == "train" and world.rank == 0:
            weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
            (folder / "weights").write_bytes(weights)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
