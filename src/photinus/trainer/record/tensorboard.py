"""Event files for TensorBoard beside a run's own files, in `tensorboard/` of its folder. Rank 0's affair.

| tag | over | what |
|---|---|---|
| loss/step, loss/epoch | step | the training loss, of each step and the mean of each epoch |
| epoch/NAME | step | what was logged at the epoch's end (validation) |
| learning_rate, samples_per_s | step | at the epoch's end |
| step_ms/PHASE | step | where a step's time went, the mean of the ranks |
| memory_mib/rank_R, waiting_ms/rank_R | step | of up to 16 ranks |
| config | - | the options of the run, as a table |

A run that goes on from a checkpoint says so in its file (`purge_step`): TensorBoard then drops what was written after
that checkpoint, and shows each step once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import PhotinusError
from ...runlog.tables import OWN_COLUMNS, PHASES, Row, StepLoss, Window

FOLDER = "tensorboard"
_RANKS_SHOWN = 16


def check_tensorboard() -> None:
    """Raises PhotinusError, before any training, when event files cannot be written."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    except ImportError as error:
        raise PhotinusError(
            f"tensorboard=True writes event files with the package tensorboard, which cannot be imported here "
            f"({error}): pip install tensorboard; or leave tensorboard=True out."
        ) from None


class TensorBoard:
    """Writes one run's event files, from the step that it goes on from; its options are text at the first start."""

    def __init__(self, folder: Path, step: int, options: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # The step that comes next is the first to drop; a fresh folder has none.
        self._writer: Any = SummaryWriter(str(folder / FOLDER), purge_step=step + 1)
        if step == 0:
            rows = "\n".join(f"| {name} | {value} |" for name, value in options.items())
            self._writer.add_text("config", f"| option | value |\n|---|---|\n{rows}", 0)

    def add_losses(self, losses: Sequence[StepLoss], start: int) -> None:
        """The losses of some steps."""
        for each in losses:
            self._writer.add_scalar("loss/step", each.loss, each.step)

    def add_window(self, window: Window) -> None:
        """Write the uses of some steps' time."""
        ranks = window.world_size
        for phase in PHASES:
            self._writer.add_scalar(f"step_ms/{phase}", sum(window.phases[phase]) / ranks * 1e3, window.step)
        for rank in range(min(ranks, _RANKS_SHOWN)):
            self._writer.add_scalar(f"memory_mib/rank_{rank}", window.memory["resident"][rank] / 2**20, window.step)
            self._writer.add_scalar(f"waiting_ms/rank_{rank}", window.phases["waiting"][rank] * 1e3, window.step)

    def add_row(self, history: Sequence[Row]) -> None:
        """The last row of metrics.csv."""
        row = history[-1]
        step = int(row["step"])
        for name, value in row.items():
            if name == "loss":
                self._writer.add_scalar("loss/epoch", value, step)
            elif name in ("learning_rate", "samples_per_s"):
                self._writer.add_scalar(name, value, step)
            elif name not in OWN_COLUMNS:
                self._writer.add_scalar(f"epoch/{name}", value, step)
        self._writer.flush()

    def flush(self) -> None:
        """Brings all to the disk; a checkpoint relies on what lies before it."""
        self._writer.flush()

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()
