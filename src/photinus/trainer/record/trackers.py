"""Loggers for TensorBoard, Weights & Biases and MLflow. Their packages are imported only where they are used.

After a resume the same W&B or MLflow run continues: its id is in the run's folder, in wandb/run-id or mlflow/run-id.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...runlog.files import write_atomically

_name_for_mlflow = partial(re.compile(r"[^\w\-. :/]").sub, "_")


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
