"""The end of a run before its last epoch, by what its rows say."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ..errors import PhotinusError
from ..parallel.exchange.agreement import from_rank_0
from ..runlog.tables import Row
from ..runlog.units import number, plural
from ..words import hint
from .data.arguments import check_all, refuse_if, whole_number
from .session.progress import say


class EarlyStopping:
    """End a run when a metric no longer improves: `state={"stopping": photinus.EarlyStopping("accuracy", patience=3)}`.

    It goes into `state` of a Loop, or into `callbacks` of a Trainer. The loop asks it after each whole row of
    metrics.csv, by rank 0's numbers, and all ranks stop at the same step. Its counts are part of checkpoints. A run
    that it stopped has nothing to do when it is started again; with more patience it continues.

    Args:
        metric: "loss" or a metric that is logged in each row. The highest value is best; with "-" before the name
            ("-valid_loss") the lowest, as in `photinus.Saving(best=...)`.
        patience: end the run after N rows in a row without an improvement. Default: 3.
        min_delta: a change counts as an improvement if it is larger than this. Default: 0.0.

    A value that is not finite is no improvement; a line says so.

    Raises:
        TypeError, ValueError: the metric is not a name, or a loss whose highest value would be best; patience is below
            1; min_delta is below 0.

    Attributes:
        best: the best value so far, None before the first.
        rows: number of rows since then.
        stopped: why it ended the run, as text; "" before.
    """

    def __init__(self, metric: str, patience: int = 3, min_delta: float = 0.0) -> None:
        example = 'needs the name of a metric that is logged, such as "accuracy" or "-loss"'
        is_name = isinstance(metric, str) and bool(metric.removeprefix("-"))
        rises = f"the lowest loss is best: write EarlyStopping('-{metric}')"
        is_number = isinstance(min_delta, (int, float)) and 0 <= min_delta < math.inf
        check_all(
            partial(refuse_if, not is_name, TypeError(f"EarlyStopping({metric!r}): {example}")),
            partial(refuse_if, metric in ("loss", "valid_loss"), ValueError(f"EarlyStopping({metric!r}): {rises}")),
            partial(whole_number, "patience", patience, least=1),
            partial(refuse_if, not is_number, ValueError(f"min_delta={min_delta!r}: needs a number from 0")),
        )
        self.metric, self.patience, self.min_delta = metric, int(patience), float(min_delta)
        self.best: float | None = None
        self.rows = 0
        self.stopped = ""
        self.goes_on = False  # it had stopped the run that was loaded, and has more patience now

    def __repr__(self) -> str:
        return f"EarlyStopping({self.metric!r}, patience={self.patience}, min_delta={self.min_delta:g})"

    def after_row(self, row: Row) -> str:
        """Return why the run ends after this row, "" if it goes on. Raises PhotinusError if the metric is missing."""
        name = self.metric.removeprefix("-")
        if name not in row:
            raise PhotinusError(
                f"{self!r}: the row of step {int(row['step'])} has no {name!r}; it has {', '.join(sorted(row))}."
                f"{hint(name, row, show=repr)} Log it on rank 0 in each body in which loop.validation_due is true: "
                f"loop.log({name}=...)"
            )
        value, sign = float(row[name]), 1.0 if name == self.metric else -1.0
        if math.isfinite(value) and (self.best is None or sign * (value - self.best) > self.min_delta):
            self.best, self.rows = value, 0
        else:
            self.rows += 1
        if self.rows >= self.patience:
            self.stopped = self._reason(name)
        return self.stopped

    def _reason(self, name: str) -> str:
        span = f"in the last {plural(self.rows, 'row')}"
        if self.best is None:
            return f"{name} was not a finite number {span}"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return f"{name} did not {'rise above' if name == self.metric else 'fall below'} {number(self.best)}{by} {span}"

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {name: getattr(self, name) for name in ("metric", "best", "rows", "stopped")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; what was counted of another metric does not count."""
        is_other = state["metric"] != self.metric
        self.best, self.rows = (None, 0) if is_other else (state["best"], state["rows"])
        self.stopped = state["stopped"] if self.rows >= self.patience else ""
        self.goes_on = bool(state["stopped"]) and not self.stopped


def reason_to_stop(judges: Iterable[Any], row: Row, *, is_main: bool) -> str:
    """Return why a run ends after this row, by rank 0's row and judgement; "" if it goes on. All ranks call it.

    Args:
        judges: objects of a loop's `state` with a method `after_row(row)`.
    """
    judges = [*judges]
    if not judges:
        return ""

    def judge() -> list[Any]:
        return [row, *(str(each.after_row(row) or "") for each in judges)]

    row_of_main, *reasons = from_rank_0(judge, "deciding whether to stop early")
    for each in judges:
        if not isinstance(each, EarlyStopping):
            continue
        if not is_main:
            each.after_row(row_of_main)
        elif not math.isfinite(value := row[name := each.metric.removeprefix("-")]):
            say(f"warning: {name} is {value}, which {each!r} counts as a row without an improvement")
    return next(filter(None, reasons), "")
