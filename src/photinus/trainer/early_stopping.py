"""The end of a run before its last epoch, by what its rows say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import PhotinusError
from ..parallel.exchange.agreement import from_rank_0
from ..runlog.tables import Row
from ..runlog.units import number, plural
from ..words import hint
from .data.arguments import checking, whole_number
from .session.progress import say


class EarlyStopping:
    """End a run when a metric no longer improves: `state={"stopping": photinus.EarlyStopping("accuracy", patience=3)}`.

    It goes into `state` of a Loop, or into `callbacks` of a Trainer. The loop asks it after each whole row of
    metrics.csv, by rank 0's numbers, and all ranks stop at the same step. Its counts are part of checkpoints. A run
    that it stopped has nothing to do when it is started again; with more patience it continues.

    Args:
        metric: "loss" or a metric that is logged in each row. The highest value is best; with "-" before the name
            ("-valid_loss") the lowest, as in `photinus.Saving(best=...)`.
        patience: end the run after N rows in a row without an improvement (nan and inf are none). Default: 3.
        min_delta: a change counts as an improvement if it is larger than this. Default: 0.0.

    Raises:
        TypeError, ValueError: an argument that cannot be right.

    Attributes:
        best, rows: the best value so far, None before the first; number of rows since then.
        stopped: why it ended the run, as text; "" before.
    """

    def __init__(self, metric: str, patience: int = 3, min_delta: float = 0.0) -> None:
        with checking() as check:
            example = 'needs the name of a metric that is logged, such as "accuracy" or "-loss"'
            is_name = isinstance(metric, str) and metric.removeprefix("-")
            check(is_name, f"EarlyStopping({metric!r}): {example}", TypeError)
            rises = f"EarlyStopping({metric!r}): the lowest loss is best: write EarlyStopping('-{metric}')"
            check(metric not in ("loss", "valid_loss"), rises)
            check.call(whole_number, "patience", patience, least=1)
            is_number = isinstance(min_delta, (int, float)) and 0 <= min_delta < math.inf
            check(is_number, f"min_delta={min_delta!r}: needs a number from 0")
        self.metric, self.patience, self.min_delta = metric, int(patience), float(min_delta)
        self.name = metric.removeprefix("-")
        self.begin()

    def begin(self) -> None:
        """Forget the rows of an earlier run: a loop that is made begins a run, or loads its checkpoint."""
        self.best: float | None = None
        self.rows, self.stopped = 0, ""
        self.goes_on = False  # it had stopped the run that was loaded, and has more patience now

    def __repr__(self) -> str:
        return f"EarlyStopping({self.metric!r}, patience={self.patience}, min_delta={self.min_delta:g})"

    def after_row(self, row: Row) -> str:
        """Return why the run ends after this row, "" if it goes on. Raises PhotinusError if the metric is missing."""
        if self.name not in row:
            raise PhotinusError(
                f"{self!r}: the row of step {int(row['step'])} has no {self.name!r}; it has {', '.join(sorted(row))}."
                f"{hint(self.name, row, show=repr)} Log it on rank 0 in each body in which loop.validation_due is "
                f"true: loop.log({self.name}=...)"
            )
        value, sign = float(row[self.name]), 1.0 if self.name == self.metric else -1.0
        is_better = math.isfinite(value) and (self.best is None or sign * (value - self.best) > self.min_delta)
        self.best, self.rows = (value, 0) if is_better else (self.best, self.rows + 1)
        if self.rows >= self.patience:
            by = f" by more than {self.min_delta:g}" if self.min_delta else ""
            change = f"did not {'rise above' if sign > 0 else 'fall below'} {number(self.best or 0.0)}{by}"
            change = "was not a finite number" if self.best is None else change
            self.stopped = f"{self.name} {change} in the last {plural(self.rows, 'row')}"
        return self.stopped

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {name: getattr(self, name) for name in ("metric", "best", "rows", "stopped")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; what was counted of another metric does not count."""
        is_same = state["metric"] == self.metric
        self.best, self.rows = (state["best"], state["rows"]) if is_same else (None, 0)
        self.stopped = state["stopped"] if self.rows >= self.patience else ""
        self.goes_on = bool(state["stopped"]) and not self.stopped


def reason_to_stop(judges: Sequence[Any], row: Row, *, is_main: bool) -> str:
    """Return why a run ends after this row, by rank 0's row and judgement; "" if it goes on. All ranks call it.

    Args:
        judges: objects of a loop's `state` with a method `after_row(row)`.
    """
    if not judges:
        return ""

    def judge() -> list[Any]:
        return [row, *(str(each.after_row(row) or "") for each in judges)]

    row, *reasons = from_rank_0(judge, "deciding whether to stop early")
    for each in judges:
        if isinstance(each, EarlyStopping) and not is_main:
            each.after_row(row)
        elif isinstance(each, EarlyStopping) and not math.isfinite(row[each.name]):
            say(f"warning: {each.name} is {row[each.name]}, which {each!r} counts as a row without an improvement")
    return next(filter(None, reasons), "")
