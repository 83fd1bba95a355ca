"""Loggers: where rank 0 sends a run's numbers beside the run's own files, such as TensorBoard; see docs/how-to/log.md.

Each logger has a thread of its own, and costs the training neither time nor bits nor its end: the thread that trains
only puts calls into a queue, and drops a logger that raises or does not keep up. The packages of our own loggers are
imported only where they are used. After a resume the same W&B or MLflow run continues: its id is in the run's folder,
in wandb/run-id or mlflow/run-id.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import Queue
from typing import Any, Protocol

from ...errors import PhotinusError
from ...runlog.files import write_atomically
from ...runlog.tables import OWN_COLUMNS, PHASES, Row, StepLoss, Window
from ..data import rng

_RANKS_SHOWN = 16
_MOST_CALLS = 10_000  # that wait for one logger
_START_S, _CALL_S, _END_S = 30.0, 60.0, 10.0
_name_for_mlflow = partial(re.compile(r"[^\w\-. :/]").sub, "_")


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
        for each in self._threads:  # each gets a copy of its own, which it may change
            each.calls.put((method, deepcopy(arguments)))

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


class TensorBoard:
    """Write event files for TensorBoard, in `tensorboard/` of the run's folder (`pip install tensorboard`).

    If a run continues from a checkpoint, TensorBoard drops the steps after that checkpoint, and shows each step once.
    """

    _module = "torch.utils.tensorboard"

    def start(self, config: Mapping[str, Any]) -> None:
        """Open a file; the options are text at the first start, and in a new folder."""
        from torch.utils.tensorboard import SummaryWriter

        folder, step = Path(config["out"], "tensorboard"), config["resumed_step"]
        is_first = step == 0 or not folder.exists()
        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)  # the next one is the first to drop
        if is_first:
            rows = "\n".join(f"| {name} | {value} |" for name, value in config.items())
            self._writer.add_text("config", f"| option | value |\n|---|---|\n{rows}", 0)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Write numbers to the disk, so that a resumed run lacks none from before its checkpoint."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def picture(self, name: str, path: Path) -> None:
        """Write a picture."""
        from matplotlib.image import imread

        self._writer.add_image(name, imread(path), dataformats="HWC")

    def end(self, status: str) -> None:
        """Close the file."""
        self._writer.close()


class Wandb:
    """Log to Weights & Biases (`pip install wandb`): `photinus.Wandb(project="digits", mode="offline")`.

    In mode "offline" the run is in `wandb/` of the run's folder; `wandb sync` uploads it. If a step is logged again
    after a resume, W&B keeps the first values.

    Args:
        options: options of `wandb.init`, such as project, entity, name, tags and mode.
    """

    _module = "wandb"

    def __init__(self, **options: Any) -> None:
        self._options = options

    def start(self, config: Mapping[str, Any]) -> None:
        """Start the run, or continue it."""
        import wandb

        out = Path(config["out"])
        options = {"dir": out, "config": dict(config), "resume": "allow", "reinit": "create_new"}
        options["id"] = _kept_id(out / "wandb", lambda: secrets.token_hex(4))
        # Captured output would put W&B between the training and its prints.
        options["settings"] = wandb.Settings(console="off", silent=True)
        self._run: Any = wandb.init(**{**options, **self._options})

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Log numbers."""
        self._run.log(dict(row), step=step)

    def picture(self, name: str, path: Path) -> None:
        """Log a picture."""
        import wandb

        self._run.log({name: wandb.Image(str(path))})

    def end(self, status: str) -> None:
        """Finish the run."""
        self._run.finish(exit_code=int(status == "error"))


class MLflow:
    """Log to MLflow (`pip install mlflow`, or mlflow-skinny): `photinus.MLflow(experiment="digits")`.

    Args:
        tracking_uri: a folder or a server. Default: MLFLOW_TRACKING_URI, else `mlflow/` of the run's folder.
        experiment: name of the experiment. Default: "photinus". The run has the name of its folder.
    """

    _module = "mlflow"

    def __init__(self, *, tracking_uri: str | None = None, experiment: str = "photinus") -> None:
        self._uri, self._experiment = tracking_uri, experiment
        # Telemetry draws from Python's global random numbers at any time. The other: newer versions refuse a folder.
        for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):
            os.environ.setdefault(name, "true")

    def start(self, config: Mapping[str, Any]) -> None:
        """Start the run, with the options as its parameters, or continue it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        folder = Path(config["out"]).absolute()
        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow").as_uri()
        self._client = client = MlflowClient(uri)
        self._last_steps: dict[str, int] = {}  # by name; of what was logged before this start

        def create() -> str:
            found = client.get_experiment_by_name(self._experiment)
            experiment = found.experiment_id if found else client.create_experiment(self._experiment)
            run_id: str = client.create_run(experiment, run_name=folder.name).info.run_id
            params = {_name_for_mlflow(name): str(value)[:500] for name, value in config.items()}
            client.log_batch(run_id, params=[Param(*each) for each in params.items()])
            return run_id

        self._id = _kept_id(folder / "mlflow", create)
        client.update_run(self._id, status="RUNNING")

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Log numbers."""
        from mlflow.entities import Metric

        new, now_ms = [], int(time.time() * 1000)
        for name, value in ((_name_for_mlflow(name), value) for name, value in row.items()):
            if name not in self._last_steps:
                earlier = self._client.get_metric_history(self._id, name)
                self._last_steps[name] = max((each.step for each in earlier), default=-1)
            if step > self._last_steps[name]:  # else MLflow would show both
                new.append(Metric(name, value, now_ms, step))
        self._client.log_batch(self._id, metrics=new)

    def picture(self, name: str, path: Path) -> None:
        """Log a picture, as an artifact."""
        self._client.log_artifact(self._id, str(path))

    def end(self, status: str) -> None:
        """Finish the run."""
        ends = {"error": "FAILED", "left": "KILLED", "suspended": "SCHEDULED"}
        self._client.set_terminated(self._id, ends.get(status, "FINISHED"))


def _kept_id(folder: Path, make: Callable[[], str]) -> str:
    """Return the id of the run, which its first start put into this folder."""
    path = folder / "run-id"
    if not path.exists():
        write_atomically(path, make())
    return path.read_text(encoding="utf-8")
