"""Loggers: where rank 0 sends a run's numbers beside the run's own files; docs/how-to/log.md lists them.

Each logger has a thread of its own, and costs the training neither time nor bits nor its end: the thread that trains
only puts calls into a queue, and drops a logger that raises or does not keep up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from queue import Queue
from typing import Any, Protocol

from ...errors import PhotinusError
from ...runlog.tables import OWN_COLUMNS, PHASES, Row, StepLoss, Window
from ..data import rng

_RANKS_SHOWN = 16
_MOST_CALLS = 10_000  # that wait for one logger
_START_S, _CALL_S, _END_S = 30.0, 60.0, 10.0


class Logger(Protocol):
    """An object for `Reporting(loggers=[...])`; start(config), picture(name, path) and end(status) may be absent."""

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Take some numbers of a step, by name."""


def check_packages(loggers: Sequence[Logger]) -> None:
    """Raise PhotinusError, before any training, where the package of one of our loggers cannot be imported."""
    for logger in loggers:
        try:
            # Not in its thread: some packages start threads, or draw random numbers, when they are imported.
            import_module(getattr(logger, "_module", "photinus"))
        except ImportError as error:
            name = type(logger).__name__
            why = f"photinus.{name} needs the package {name.lower()}, which cannot be imported here ({error})"
            raise PhotinusError(f"{why}: pip install {name.lower()}; or remove this logger.") from None


class Loggers:
    """The loggers of a run on rank 0. `warn` gets a line about each that is dropped, in the thread that trains."""

    def __init__(self, loggers: Sequence[Logger], warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._threads = [_LoggerThread(each) for each in loggers]

    def start(self, config: Mapping[str, Any]) -> None:
        """Start them before the first step, and wait for that a while: errors are then shown at once."""
        numbers = rng.capture()  # MLflow draws some, for the ids that it makes
        self.call("start", config)
        deadline = time.monotonic() + _START_S
        for each in self._threads:
            each.start()
        for each in self._threads:
            each.is_started.wait(max(0.0, deadline - time.monotonic()))
        rng.restore(numbers)
        self._drop_failed()

    def add_losses(self, losses: Sequence[StepLoss], start: int) -> None:
        """Log the losses of some steps."""
        for each in losses:
            self.call("log", each.step, {"loss/step": each.loss})

    def add_window(self, window: Window) -> None:
        """Log where the time of some steps went."""
        ranks = window.world_size
        row = {f"step_ms/{phase}": sum(window.phases[phase]) / ranks * 1e3 for phase in PHASES}
        for rank in range(min(ranks, _RANKS_SHOWN)):
            row[f"memory_mib/rank_{rank}"] = window.memory["resident"][rank] / 2**20
            row[f"waiting_ms/rank_{rank}"] = window.phases["waiting"][rank] * 1e3
        self.call("log", window.step, row)

    def add_row(self, history: Sequence[Row]) -> None:
        """Log the last row of metrics.csv."""
        row = history[-1]
        names = {name: f"epoch/{name}" for name in row if name not in OWN_COLUMNS}
        names |= {"loss": "loss/epoch", "learning_rate": "learning_rate", "samples_per_s": "samples_per_s"}
        self.call("log", int(row["step"]), {names[name]: value for name, value in row.items() if name in names})

    def end(self, status: str) -> None:
        """End them, and wait for that a few seconds. A second call does nothing."""
        self.call("end", status)
        deadline = time.monotonic() + _END_S
        for each in self._threads:
            each.join(max(0.0, deadline - time.monotonic()))
        self._drop_failed(is_over=True)
        self._threads = []

    def call(self, method: str, *arguments: Any) -> None:
        """Let each logger's thread call this method, if the logger has it."""
        self._drop_failed()
        for each in self._threads:
            each.calls.put((method, arguments))

    def _drop_failed(self, is_over: bool = False) -> None:
        for each in list(self._threads):
            if problem := each.problem(is_over):
                self._threads.remove(each)
                each.is_dropped = True
                self._warn(f"{each.about} is dropped, the training is not affected: {problem}")


class _LoggerThread(threading.Thread):
    """Makes the calls of one logger, in order, until one raises."""

    def __init__(self, logger: Logger) -> None:
        self.about = f"the logger {type(logger).__name__}"
        super().__init__(name=f"photinus {self.about}", daemon=True)  # a hanging one does not keep the process
        self.calls: Queue[tuple[str, tuple[Any, ...]]] = Queue()
        self.is_started = threading.Event()
        self.is_dropped = False
        self._logger, self._error = logger, ""
        self._doing, self._since_s = "start", time.monotonic()

    def problem(self, is_over: bool) -> str:
        """Return why this logger is to be dropped, or an empty text; `is_over`: it should have ended."""
        is_late = (is_over and self.is_alive()) or self.calls.qsize() >= _MOST_CALLS
        if is_late or (self._doing and time.monotonic() - self._since_s > _CALL_S):
            return self._error or f"it is still in {self._doing}, with {self.calls.qsize()} more calls to make"
        return self._error

    def run(self) -> None:
        method = ""
        while method != "end" and not (self._error or self.is_dropped):
            method, arguments = self.calls.get()
            self._since_s = time.monotonic()
            self._doing = f"{method}({arguments[0]})" if method in ("log", "picture") else method
            try:
                if method == "log" or hasattr(self._logger, method):
                    getattr(self._logger, method)(*arguments)
            except BaseException as error:  # noqa: BLE001 - SystemExit too: it costs the logger, not the training
                lines = [type(error).__name__, *str(error).strip().splitlines()[:1]]
                self._error = f"{self._doing} raised {': '.join(lines)}"
            self._doing = ""
            self.is_started.set()
