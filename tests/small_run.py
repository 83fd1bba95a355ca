"""A small run that the tests of the trainer share: data, a model with everything that resume can get wrong, a loop.

The model has BatchNorm (buffers), dropout (random numbers), and the optimizer momentum; the data set draws random
numbers for each sample (augmentation).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import photinus
from photinus import env
from photinus.trainer import unwrap

FEATURES, CLASSES = 6, 3
QUIET = photinus.Reporting(progress=False, curves=False)


def points(samples: int = 48) -> TensorDataset:
    """Points in three clouds: (float32 [6], int64 [])."""
    generator = torch.Generator().manual_seed(5)
    targets = torch.randint(CLASSES, (samples,), generator=generator)
    centres = torch.eye(CLASSES, FEATURES) * 2
    return TensorDataset(torch.randn(samples, FEATURES, generator=generator) * 0.7 + centres[targets], targets)


class Noisy(Dataset[Any]):
    """Adds random noise from torch's global generator to each sample, as augmentation does."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point, target = self.dataset[index]
        return point + 0.1 * torch.randn(FEATURES), target


class Numbered(Dataset[int]):
    """Sample i is i."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Net(nn.Sequential):
    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Dropout(dropout), nn.Linear(16, CLASSES)
        )


def right(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.argmax(dim=1) == targets


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, bit by bit."""
    digest = hashlib.sha256()
    for name, value in sorted(unwrap(model).state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class CutOffError(Exception):
    """A test's simulated end of a process."""


def train(
    out: Path | str | None,
    *,
    epochs: int = 3,
    batch_size: int = 8,
    samples: int = 48,
    cut_at_step: int | None = None,
    kill: Callable[[int], None] | None = None,
    noisy: bool = True,
    dropout: float = 0.5,
    seed: int = 7,
    backend: str = "gloo",
    wait_s: float = 0.0,
    save_every: int | None = None,
    num_workers: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """One process's life: trains until the end, or until the body of step `cut_at_step`, after its optimizer step."""
    with photinus.init(backend, os.environ.get("DEVICE_OF_TEST", "cpu"), seed=seed) as world:
        plain = Net(dropout)
        model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
        train_set: Any = Noisy(points(samples)) if noisy else points(samples)
        batches = photinus.loader(train_set, batch_size=batch_size, num_workers=num_workers)
        options = {"report": QUIET, "save": photinus.Saving(every_steps=save_every), **options}
        state = {"scheduler": scheduler}
        loop = photinus.Loop(model, optimizer, batches, epochs=epochs, out=out, state=state, **options)
        began_at = loop.step
        for inputs, targets in loop:
            loop.backward(cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if loop.epoch_ended:
                loop.log(right=photinus.evaluate(model, points(31), right, batch_size=8))
                scheduler.step()
            if wait_s:
                time.sleep(wait_s)
            if kill is not None:
                kill(loop.step)
            if cut_at_step is not None and loop.step == cut_at_step:
                raise CutOffError(f"rank {world.rank} cut off at step {loop.step}")
        return {
            "fingerprint": fingerprint(model),
            "history": loop.history,
            "step": loop.step,
            "began_at": began_at,
            "attempt": env.ATTEMPT.get(),
            "rate": optimizer.param_groups[0]["lr"],
        }


def main(out: str, kills: str, options: str) -> None:
    """A script for launchers. `kills` is "attempt:rank:step,...": where which rank gets SIGKILL in its body."""
    planned = {tuple(int(part) for part in kill.split(":")) for kill in kills.split(",") if kill}
    attempt, rank = env.ATTEMPT.get(), int(os.environ.get("RANK", "0"))

    def kill(step: int) -> None:
        if (attempt, rank, step) in planned:
            os.kill(os.getpid(), signal.SIGKILL)

    result = train(out, kill=kill, **json.loads(options))
    Path(out, f"result-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
